"""Reads a run file up to the point where the schema takes over: text, old spellings, overrides, the fate of each key.

Contract: `read` gives plain tables in today's spelling. `RawRun.validate` gives each key its fate (see
`harbortrainer.config.keys`) and hands what is left to the schema. Nothing is written.
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from harbortrainer.config import keys, legacy, overrides
from harbortrainer.config.explain import explain, unknown_key, without_indices
from harbortrainer.config.settle import settle
from harbortrainer.errors import UserError

# Tables that belong to verifiers or renderers; their own classes check what is inside.
FOREIGN = ("env", "serve", "renderer")


@dataclass(frozen=True)
class RawRun:
    """A run file in today's spelling, before the schema.

    Args:
        file: The path as the user wrote it.
        data: The tables, with overrides applied.
        notes: What the user should be told about the reading.
        upgraded: The new text of the file when it was in the old spelling, else None.
    """

    file: str
    data: dict[str, Any]
    notes: tuple[str, ...] = ()
    upgraded: str | None = None

    def get(self, dotted: str, default: Any = None) -> Any:
        """The value at a dotted key (no indices), or `default`."""
        at: Any = self.data
        for part in dotted.split("."):
            if not isinstance(at, dict) or part not in at:
                return default
            at = at[part]
        return at

    def validate[Model: BaseModel](self, schema: type[Model]) -> tuple[Model, tuple[str, ...]]:
        """The run as the embedded engine sees it, with the notes about it.

        Raises:
            UserError: A key that does not exist, is refused, or has a value that cannot be.
        """
        check_known(self.data, self.file)
        data, unused = settle(self.data, self.file)
        notes = (*self.notes, *_unused_note(unused))
        try:
            return schema.model_validate(data), notes
        except ValidationError as error:
            raise explain(error, self.file, known=known_keys()) from None


def read(path: Path | str, arguments: Sequence[str] = ()) -> RawRun:
    """Read a run file in either spelling and apply overrides.

    Raises:
        UserError: No such file, not TOML (with the line), or an old spelling that has no translation.
    """
    text = _text(Path(path))
    new_text, notes = legacy.upgrade(text, str(path))
    data = overrides.apply(_parse(new_text, str(path)), overrides.parse(arguments), known_tables())
    return RawRun(str(path), _nulls(data), tuple(notes), new_text if notes else None)


@cache
def known_keys() -> tuple[str, ...]:
    """Every dotted key there is: Prime-RL's schema at the pin, and ours."""
    snapshot = resources.files("harbortrainer.config").joinpath("prime_rl_keys.txt").read_text()
    return (*snapshot.split(), *sorted(keys.OURS))


@cache
def known_tables() -> frozenset[str]:
    """Every dotted key that is a table."""
    return frozenset(key.rpartition(".")[0] for key in known_keys() if not key.endswith(".*"))


def check_known(data: dict[str, Any], file: str) -> None:
    """Refuse the first key that neither Prime-RL nor we know.

    Raises:
        UserError: With the nearest key that exists.
    """
    known = set(known_keys())
    for key, _ in walk(data):
        plain = without_indices(key)
        inside = keys.longest(plain, {k[:-2] for k in known if k.endswith(".*")} | keys.OURS)
        if plain not in known and not inside:
            raise unknown_key(key, file, known_keys())


def walk(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of nested tables, tables before what is in them; foreign tables are not entered."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        yield key, value
        if name in FOREIGN or key in keys.OURS:
            continue
        if isinstance(value, dict):
            yield from walk(value, f"{key}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from walk(item, f"{key}[{index}].")


def _text(path: Path) -> str:
    if not path.is_file():
        raise UserError(
            "no such file", where=str(path), do="pass --config a TOML file, such as configs/quickstart.toml"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError("not UTF-8 text", where=str(path), do="save it as UTF-8") from None


def _parse(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not valid TOML: {error}", where=file, do="correct that line") from None


def _nulls(value: Any) -> Any:
    """`"None"` as null, since TOML has none; as Prime-RL reads it."""
    if isinstance(value, dict):
        return {key: _nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nulls(item) for item in value]
    return None if value == "None" else value


def _unused_note(unused: list[str]) -> tuple[str, ...]:
    if not unused:
        return ()
    return (f"not used by the embedded engine, which needs no such setting: {', '.join(unused)}",)
