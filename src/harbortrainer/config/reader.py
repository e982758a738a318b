"""Reads a run file: its text, in today's spelling, with overrides, each key given its fate, as a `RunConfig`.

Contract: `read` gives plain tables in today's spelling, for either engine; `load` what the embedded engine makes of
them. Nothing is written but by `upgrade_file`.
Invariant: no key is dropped in silence. A key is honoured, or named in `RunConfig.notes` because only Prime-RL's own
processes use it, or refused in one line that says what to do.
"""

import shutil
import tomllib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harbortrainer.config import legacy
from harbortrainer.config.explain import explain
from harbortrainer.config.honoured import honoured
from harbortrainer.config.known_keys import check_known, known_keys
from harbortrainer.config.overrides import Override, apply, blamed, parse
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.table import TomlTable, lookup
from harbortrainer.errors import UserError


@dataclass(frozen=True)
class RawRun:
    """A run file in today's spelling, before the schema.

    Args:
        file: The path as the user wrote it.
        data: The tables, with overrides applied.
        notes: What the user should be told about the reading.
        upgraded: The new text of the file when it was in the old spelling, else None.
        overrides: What the command line changed.
    """

    file: str
    data: TomlTable
    notes: tuple[str, ...] = ()
    upgraded: str | None = None
    overrides: tuple[Override, ...] = ()

    def get(self, dotted: str, default: Any = None) -> Any:
        """The value at a dotted key (no indices), or `default`."""
        return lookup(self.data, dotted, default)

    @contextmanager
    def blaming(self) -> Generator[None]:
        """Whatever is wrong with a key that the command line set is told of the command line, not of the file."""
        try:
            yield
        except UserError as error:
            raise blamed(error, self.file, self.overrides) from error.__cause__


def load(path: Path | str, arguments: Sequence[str] = ()) -> RunConfig:
    """Read a run file for the embedded engine.

    Args:
        path: A TOML file in Prime-RL's schema, in today's spelling or the old one.
        arguments: As on Prime-RL's command line: `["--orchestrator.batch-size", "32", "--no-clean"]`.

    Returns:
        The run with every default filled in; what the user should be told is in `.notes`.

    Raises:
        UserError: With the file, the dotted key (or the line) and what to do.
    """
    raw = read(path, arguments)
    with raw.blaming():
        return from_raw(raw)


def read(path: Path | str, arguments: Sequence[str] = ()) -> RawRun:
    """Read a run file in either spelling and apply overrides.

    Raises:
        UserError: No such file, not TOML (with the line), an old spelling that has no translation, or an override that
            cannot be.
    """
    file = str(path)
    text, notes = legacy.upgrade(_text(Path(path)), file)
    found = tuple(parse(arguments))
    data = apply(_parse(text, file), found)
    nulled = {key: _nulls(value) for key, value in data.items()}
    return RawRun(file, nulled, tuple(notes), text if notes else None, found)


def from_raw(raw: RawRun) -> RunConfig:
    """What the embedded engine makes of a file that was read already.

    Raises:
        UserError: A key that does not exist, is refused, or has a value that cannot be.
    """
    check_known(raw.data, raw.file)
    data, unused = honoured(raw.data, raw.file)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise explain(error, raw.file, known=known_keys()) from None
    if config.inference.engine != "vllm" and raw.get("inference.vllm.gpu_memory_utilization") is not None:
        unused = list(dict.fromkeys([*unused, "inference"]))  # the embedded sampler measures what is free
    note = f"not used by the embedded engine, which needs no such setting: {', '.join(unused)}"
    return config.with_notes(*raw.notes, *([note] if unused else []))


def upgrade_file(file: Path, output: Path | None) -> list[str]:
    """Write a run file in today's spelling; in place, the old one is kept beside it as `FILE.old`.

    Returns:
        What was done, a line each.

    Raises:
        UserError: No such file, not TOML, or an old spelling that cannot be translated.
    """
    raw = read(file)
    check_known(raw.data, raw.file)
    if raw.upgraded is None:
        return [f"{file}: nothing to do, this is today's spelling"]
    if output is None:
        shutil.copy2(file, file.with_name(f"{file.name}.old"))
    (output or file).write_text(raw.upgraded, encoding="utf-8")
    return [raw.notes[0].split(";")[0], f"written to {output or file}"]


def _text(path: Path) -> str:
    if not path.is_file():
        do = "pass --config a TOML file, such as configs/quickstart.toml"
        raise UserError("no such file", where=str(path), do=do)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError("not UTF-8 text", where=str(path), do="save it as UTF-8") from None


def _parse(text: str, file: str) -> TomlTable:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not valid TOML: {error}", where=file, do="correct that line") from None


def _nulls(value: object) -> object:
    """`"None"` as null, since TOML has none; as Prime-RL reads it."""
    if isinstance(value, dict):
        return {key: _nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nulls(item) for item in value]
    return None if value == "None" else value
