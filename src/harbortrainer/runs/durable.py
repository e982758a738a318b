"""Crash-safe writes: atomic files and folders, and append-only JSON lines.

Invariants: after `kill -9` at any moment, a file written here is either old or complete. Only the last line of an
append-only file can be torn; `repair` removes it. A folder is the old one or the new one. While it is replaced it may
be missing; the old one is then beside it as `.NAME.old`, and `recover_folder` restores it. Temporary names start with a
dot, so that folder listings skip them.
"""

import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harbortrainer.errors import UserError


def flush(path: Path) -> None:
    """Sync a file, or the renames in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically; text is UTF-8."""
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        flush(draft)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    flush(path.parent)


def line_of(row: Mapping[str, object]) -> str:
    """Format a JSON line; NaN and infinities become null, so that any JSON reader can read it."""
    return json.dumps(finite(row), ensure_ascii=False, separators=(", ", ": ")) + "\n"


def finite(value: object) -> object:
    """Replace the floats in `value` that JSON cannot represent with None."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def append_line(path: Path, row: Mapping[str, object]) -> None:
    """Append one JSON line and sync it to disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line_of(row))
        file.flush()
        os.fsync(file.fileno())


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write a file of JSON lines atomically."""
    write_whole(path, "".join(line_of(row) for row in rows))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a JSON Lines file; a torn last line is left out, and a missing file has no lines."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    complete = text[: text.rfind("\n") + 1]
    return [_parsed(path, number, line) for number, line in enumerate(complete.split("\n"), 1) if line.strip()]


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"line {number} cannot be read", where=str(path), do="remove that line") from error


def repair(path: Path, keep: Callable[[dict[str, Any]], bool] = lambda row: True) -> int:
    """Remove a torn last line and the lines for which `keep` is false; return the number of remaining lines.

    A file that needs no repair is not written, so that this works on a full disk.
    """
    rows = [row for row in read_lines(path) if keep(row)]
    text = "".join(line_of(row) for row in rows)
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        write_whole(path, text)
    return len(rows)


@contextmanager
def atomic_folder(path: Path) -> Generator[Path]:
    """Yield an empty folder that replaces `path` atomically when the block ends without an exception.

    The contents are synced to disk first. A half-written folder of an earlier process is removed.
    """
    recover_folder(path)
    fresh = path.with_name(f".{path.name}.new")
    fresh.mkdir(parents=True)
    try:
        yield fresh
        for parent, _, names in os.walk(fresh):
            for name in [*names, ""]:
                if not (file := Path(parent) / name).is_symlink():  # a link may lead nowhere, or to a pipe
                    flush(file)
    except BaseException:  # also for Ctrl-C: no half-written folder stays
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    _take_over(fresh, path)


def recover_folder(path: Path) -> None:
    """Clean up after a process killed in `atomic_folder(path)`: restore the old folder and remove partial ones."""
    fresh, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        old.rename(path)
    for leftover in (fresh, old):
        if leftover.exists():
            shutil.rmtree(leftover)


def _take_over(fresh: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        path.rename(old)
    fresh.rename(path)
    flush(path.parent)
    if old.exists():
        shutil.rmtree(old)
