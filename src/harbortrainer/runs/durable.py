"""Writes that survive a kill: files appear whole, lines are appended whole.

Invariant: after `kill -9` at any moment a file written here is either what it was or complete; only the last line
of an append-only file can be torn, and `repair` cuts that off.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def sync_folder(path: Path) -> None:
    """Make a rename inside `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is never seen half."""
    draft = path.with_name(f".{path.name}.part")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def line_of(row: dict[str, Any]) -> str:
    """One JSON line. NaN and infinities become null: a line must be readable by any JSON reader."""
    return json.dumps(finite(row), ensure_ascii=False, separators=(", ", ": ")) + "\n"


def finite(value: Any) -> Any:
    """`value` with every float that JSON cannot hold replaced by None."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Append one JSON line and wait until it is on disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line_of(row))
        file.flush()
        os.fsync(file.fileno())


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a whole file of JSON lines at once."""
    write_whole(path, "".join(line_of(row) for row in rows))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete line of a file of JSON lines; a torn last line is left out, a missing file is empty."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    complete = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in complete.splitlines() if line.strip()]


def repair(path: Path, keep: Callable[[dict[str, Any]], bool] = lambda row: True) -> int:
    """Cut a torn last line off, and drop the lines that `keep` refuses. Returns how many lines stay."""
    rows = [row for row in read_lines(path) if keep(row)]
    if path.exists():
        write_lines(path, rows)
    return len(rows)
