"""Writes that survive a kill: files and folders appear whole, lines are appended whole.

Invariant: after `kill -9` at any moment a file written here is either what it was or complete; only the last line
of an append-only file can be torn, and `repair` cuts that off. A folder is the old one, the new one, or missing for an
instant while an old one is replaced (then the old one lies beside it as `.NAME.old` and `settle` puts it back).
Temporary names start with a dot, so that nothing that lists a folder picks one up.
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
    """Make a file, or a rename inside a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it is never seen half; text as UTF-8."""
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
    """One JSON line. NaN and infinities become null: a line must be readable by any JSON reader."""
    return json.dumps(finite(row), ensure_ascii=False, separators=(", ", ": ")) + "\n"


def finite(value: object) -> object:
    """`value` with every float that JSON cannot hold replaced by None."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def append_line(path: Path, row: Mapping[str, object]) -> None:
    """Append one JSON line and wait until it is on disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line_of(row))
        file.flush()
        os.fsync(file.fileno())


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write a whole file of JSON lines at once."""
    write_whole(path, "".join(line_of(row) for row in rows))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete line of a file of JSON lines; a torn last line is left out, a missing file is empty."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    complete = text[: text.rfind("\n") + 1]
    return [_parsed(path, number, line) for number, line in enumerate(complete.split("\n"), 1) if line.strip()]


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError) as error:
        raise UserError(f"line {number} cannot be read", where=str(path), do="take that line out") from error


def repair(path: Path, keep: Callable[[dict[str, Any]], bool] = lambda row: True) -> int:
    """Cut a torn last line off, and drop the lines that `keep` refuses. Returns how many lines stay.

    A file in which there is nothing to repair is left alone: a full disk does not keep it from being read.
    """
    rows = [row for row in read_lines(path) if keep(row)]
    text = "".join(line_of(row) for row in rows)
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        write_whole(path, text)
    return len(rows)


@contextmanager
def atomic_folder(path: Path) -> Generator[Path]:
    """A fresh folder to write into; it becomes `path`, flushed, when the block ends without an exception.

    An older folder of that name is replaced, a half-written one of an earlier process removed.
    """
    settle(path)
    fresh = path.with_name(f".{path.name}.new")
    fresh.mkdir(parents=True)
    try:
        yield fresh
        for parent, _, names in os.walk(fresh):
            for name in [*names, ""]:
                flush(Path(parent) / name)
    except BaseException:  # Ctrl-C too: the folder appears whole or not at all, and whoever writes it tells why
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    _take_over(fresh, path)


def settle(path: Path) -> None:
    """Clean up after a process that was killed inside `atomic_folder(path)`: put the old folder back, drop halves."""
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
