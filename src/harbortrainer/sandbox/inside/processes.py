"""What the first process reads about the other processes of the sandbox, in /proc.

Cheap enough to be done a few times a second: one small file a process, and the long list of its mappings only of one
that is large enough to matter. Invariant: nothing here raises since a process has ended meanwhile.
"""

import os
from dataclasses import dataclass, field

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SHARED = ("/dev/zero", "/memfd:", "/anon_hugepage")


@dataclass(frozen=True)
class Usage:
    """The memory of one process."""

    own: int
    """Resident bytes that are not a file's and are not shared."""

    shared: dict[str, int] = field(default_factory=dict)
    """Bytes of shared memory without a file in the sandbox, by device and inode, touched or not."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.own + sum(self.shared.values())


OWN = {1}
"""The first process of the sandbox, and that of the agent's part."""


def others() -> list[int]:
    """Every process of the sandbox but our own."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid not in OWN]


def session(pid: int) -> int | None:
    """The session of a process: the process id of the command that it descends from, unless it left it."""
    fields = _stat(pid)
    return int(fields[3]) if fields else None


def threads(pid: int) -> int:
    """How many threads a process has: the limit of processes counts them."""
    fields = _stat(pid)
    return int(fields[17]) if fields else 0


def _stat(pid: int) -> list[str]:
    text = read(f"/proc/{pid}/stat")
    return text.rpartition(")")[2].split() if text else []


def memory(pid: int, worth: int) -> Usage:
    """What a process uses.

    Args:
        worth: Bytes of address space above which its mappings are looked at.
    """
    text = read(f"/proc/{pid}/statm")
    if not text:
        return Usage(0)
    size, resident, shared = (int(word) * _PAGE for word in text.split()[:3])
    if size < worth:
        return Usage(resident - shared)
    maps = read(f"/proc/{pid}/maps")
    if not maps:  # another user's, or one that hides: what it shares counts as if it were its own
        return Usage(resident)
    return Usage(resident - shared, _shared(maps))


def _shared(maps: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in maps.splitlines():
        span, mode, _, device, inode, *path = line.split(None, 5)
        if mode.endswith("s") and path and path[0].startswith(_SHARED):
            start, _, end = span.partition("-")
            key = f"{device} {inode}"
            found[key] = found.get(key, 0) + int(end, 16) - int(start, 16)
    return found


def read(path: str) -> str:
    """A file of the kernel's; "" when it is not there or may not be read. Without Python's layers: it is read often."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    chunks = []
    try:
        while chunk := os.read(fd, 1 << 16):
            chunks.append(chunk)
    except OSError:
        return ""
    finally:
        os.close(fd)
    return b"".join(chunks).decode(errors="replace")
