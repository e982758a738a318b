"""Reading of run files: TOML, old and newer key names, command-line overrides, validation.

Contract: `read` returns plain tables with the key names of the pinned Prime-RL, for either engine. `load` returns the
`RunConfig` of the embedded engine. Only `upgrade_file` writes.
Invariant: no key is dropped silently. A key is supported, or named in `RunConfig.notes` because only Prime-RL's own
processes use it, or refused with a one-line error.
"""

import shutil
import tomllib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tomlkit
from pydantic import ValidationError

from harbortrainer.config import legacy
from harbortrainer.config.explain import explain
from harbortrainer.config.overrides import Override, apply, parse, renamed, with_override_location
from harbortrainer.config.plugin import all_unknown_keys, plugin_errors
from harbortrainer.config.prime_rl_key_names import Release, newer_key, newer_value, release_of
from harbortrainer.config.prime_rl_releases import to_newer, to_pinned
from harbortrainer.config.prime_rl_schema import key_errors, known_keys, pin_errors, supported_keys
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.table import TomlTable, TomlValue, lookup, nulls_as_text
from harbortrainer.config.trainer_table import loss_note, schedule_note
from harbortrainer.errors import CombinedUserError, UserError, joined, parts_of


@dataclass(frozen=True)
class RawRun:
    """A run file with pinned key names, before validation.

    Args:
        file: The path as the user wrote it.
        data: The tables, with overrides applied.
        notes: Messages for the user about the reading.
        upgraded: The translated text if the file has old key names, else None.
        overrides: The command-line overrides, with the key names of the file.
        release: The Prime-RL whose keys the file has.
        assumed: Whether the release is assumed, because the keys are the same in both.
        untranslated: Errors of keys that only newer releases support.
    """

    file: str
    data: TomlTable
    notes: tuple[str, ...] = ()
    upgraded: str | None = None
    overrides: tuple[Override, ...] = ()
    release: Release = "pin"
    assumed: bool = False
    untranslated: tuple[UserError, ...] = ()

    def get(self, dotted: str, default: TomlValue = None) -> TomlValue:
        """Return the value at a dotted key (without indices), or `default`."""
        return lookup(self.data, dotted, default)

    @contextmanager
    def locating_errors(self) -> Generator[None]:
        """Context manager: an error names a key as the file spells it, and an overridden one by its option."""
        try:
            yield
        except UserError as error:
            parts = [self._as_spelled(part) for part in parts_of(error)]
            located = [with_override_location(part, self.file, self.overrides) for part in parts]
            raise CombinedUserError(located) if len(located) > 1 else located[0] from error.__cause__

    def _as_spelled(self, error: UserError) -> UserError:
        file, found, key = error.where.partition(f"{self.file}: ")
        if self.release == "pin" or file or not found:
            return error
        return UserError(error.what, where=f"{self.file}: {newer_key(key)}", do=error.do)


def load(path: Path | str, arguments: Sequence[str] = ()) -> RunConfig:
    """Read a run file for the embedded engine.

    Args:
        path: A TOML file in Prime-RL's schema, with current or old key names.
        arguments: Overrides in Prime-RL's syntax: `["--orchestrator.batch-size", "32", "--no-clean"]`.

    Returns:
        The run with all defaults; `.notes` has messages for the user.

    Raises:
        UserError: The file is invalid; the error names the file, the dotted key or line, and what to do.
    """
    raw = read(path, arguments)
    with raw.locating_errors():
        return from_raw(raw)


def read(path: Path | str, arguments: Sequence[str] = ()) -> RawRun:
    """Read a run file with current or old key names and apply overrides.

    Raises:
        UserError: The file does not exist or is not TOML, an old key has no translation, or an override is invalid.
    """
    file = str(path)
    text, notes = legacy.upgrade(_text(Path(path)), file)
    upgraded = text if notes else None
    found = parse(arguments)
    tables = _parse(text, file)
    told: Release | None = "pin" if notes else release_of(_nulls(tables))
    release = told or "pin"
    if release != "pin" and (key := newer_value(_nulls(tables))):
        notes = [f"{file} has the defaults of newer Prime-RL, because the pinned commit has no such {key}"]
    overrides = tuple(renamed(one, release) for one in found)
    data = _nulls(apply(tables, overrides))
    untranslated: list[UserError] = []
    if release != "pin":
        data, untranslated = to_pinned(data, file)
    return RawRun(
        file=file,
        data=data,
        notes=tuple(notes),
        upgraded=upgraded,
        overrides=overrides,
        release=release,
        assumed=told is None,
        untranslated=tuple(untranslated),
    )


def from_raw(raw: RawRun) -> RunConfig:
    """Validate a run file for the embedded engine.

    Raises:
        UserError: Keys are unknown or refused, or values are invalid: all of them.
    """
    data, unused, refused = supported_keys(raw.data, raw.file)
    errors = [*raw.untranslated, *key_errors(raw.data, raw.file), *refused]
    config = None
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        errors.append(explain(error, raw.file, known=known_keys()))
    errors += plugin_errors(raw.data, raw.file)
    if errors:
        raise joined([*errors, *all_unknown_keys(raw.data, raw.file)]) or errors[0]
    assert config is not None
    if config.inference.engine != "vllm" and raw.get("inference.vllm.gpu_memory_utilization") is not None:
        unused = list(dict.fromkeys([*unused, "inference"]))  # the embedded sampler measures free memory
    note = f"ignored, because only Prime-RL's own processes use them: {', '.join(unused)}" if unused else ""
    notes = [note, loss_note(config.trainer.loss), schedule_note(config.trainer.scheduler, config.max_steps)]
    return config.with_notes(*raw.notes, *filter(None, notes))


def upgrade_file(file: Path, output: Path | None, release: Release | None = None) -> list[str]:
    """Rewrite a run file with other key names, without its comments. In place, the old file becomes `FILE.old`.

    Args:
        file: The run file.
        output: Where to write; None to replace the file.
        release: The Prime-RL that will read the file; None if it stays the same.

    Returns:
        Messages about what was done, one line each.

    Raises:
        UserError: The file does not exist or is not TOML, a key has no translation, or the text cannot be written
            without replacing another file.
    """
    raw = read(file)
    refused = [*raw.untranslated, *pin_errors(raw.data, raw.file)] if release == "pin" else []
    release = release or raw.release
    if error := joined([*key_errors(raw.data, raw.file), *refused]):
        with raw.locating_errors():
            raise error
    if raw.upgraded is None and release == raw.release:
        return [f"{file}: nothing to do, all key names are current"]
    lines = [note.split(";")[0] for note in raw.notes[:1]]
    if raw.assumed:
        lines.append("no key tells the release of the file: it was read with the defaults of the pinned commit")
    text = raw.upgraded
    if text is None or release != raw.release:
        data, notes = (raw.data, []) if release == "pin" else to_newer(raw.data, raw.file)
        text = tomlkit.dumps(nulls_as_text(data))
        lines += [f"keys of Prime-RL {raw.release} -> {release}", *notes]
    old = file.with_name(f"{file.name}.old") if output is None else file
    if old.exists() if output is None else output.is_file():
        do = "move it, or write to another file with --output"
        raise UserError("already exists", where=str(output or old), do=do)
    try:
        if output is None:
            shutil.copy2(file, old)
        (output or file).write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot be written ({error.strerror or error})"
        raise UserError(what, where=str(error.filename or output), do="pass another file with --output") from error
    return [*lines, f"written to {output or file} without comments; the old file is {old}"]


def _text(path: Path) -> str:
    if not path.is_file():
        do = "pass --config a TOML file, such as configs/quickstart.toml"
        raise UserError("is a folder" if path.is_dir() else "no such file", where=str(path), do=do)
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors of Windows begin a file with a mark
    except UnicodeDecodeError:
        raise UserError("not UTF-8 text", where=str(path), do="save the file as UTF-8") from None


def _parse(text: str, file: str) -> TomlTable:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not valid TOML: {error}", where=file, do="fix that line") from None


def _nulls(value: TomlValue) -> TomlValue:
    """Replace the text "None" by null, as Prime-RL does; TOML has no null."""
    if isinstance(value, dict):
        return {key: _nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nulls(item) for item in value]
    return None if value == "None" else value
