"""Ports of this machine that the files of a task name.

`named_ports` returns ports that the instruction, tests, solution or a step name as this machine's (`localhost:8080`,
`--port 8080`), not those in prose. If sandboxes share this machine's network (`network_choice`), the second of two
concurrent trials cannot listen on such a port, and the first one's server answers its tests.
"""

import re
from collections.abc import Iterator
from pathlib import Path

_TASK_FILES = ("instruction.md", "tests", "solution", "steps")
_MAX_READ_B = 1_000_000
_PORT = re.compile(
    rb"""(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1?\])["']?\s*[:,]\s*["']?(\d{4,5})\b|--port[ =](\d{4,5})\b"""
)


def named_ports(task: Path) -> list[int]:
    """Return the ports that a task's files name as this machine's, sorted."""
    found = {
        int(port)
        for file in _files_with_ports(task)
        for pair in _PORT.findall(_read_file(file))
        for port in pair
        if port
    }
    return sorted(port for port in found if 1024 <= port < 65536)


def _files_with_ports(task: Path) -> Iterator[Path]:
    for name in _TASK_FILES:
        yield from [task / name, *(task / name).rglob("*")]


def _read_file(file: Path) -> bytes:
    """Return the first megabyte of a file; nothing for a link or a folder."""
    if file.is_symlink() or not file.is_file():
        return b""
    try:
        with file.open("rb") as opened:
            return opened.read(_MAX_READ_B)
    except OSError:
        return b""
