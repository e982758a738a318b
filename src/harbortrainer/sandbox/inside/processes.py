"""Process and memory accounting of a sandbox from /proc, and the memory limit where no control group enforces it.

It is cheap enough to run a few times a second: one small file per process, and the list of mappings only for large
processes. `enforce_memory_limit` adds up all memory of the sandbox and kills the largest consumer above the limit. The
sum covers private memory, shared memory (anonymous and System V) and the tmpfs that is the sandbox's disk. Because
memfd files could evade it, `seccomp` denies them where this limit is in use. Between two checks, a process can exceed
the limit.

Invariants: a process that ends meanwhile raises no error. An init process is never killed.
"""

import ctypes
import os
import signal
from collections.abc import Collection
from dataclasses import dataclass, field

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SHARED = ("/dev/zero", "/memfd:", "/anon_hugepage")


@dataclass(frozen=True)
class Usage:
    """Memory of one process."""

    own: int
    """Private resident bytes."""

    shared: dict[str, int] = field(default_factory=dict)
    """Mapped bytes of anonymous shared memory, by device and inode, resident or not."""

    @property
    def total(self) -> int:
        """Private and shared bytes."""
        return self.own + sum(self.shared.values())


DISK = "/logs"
"""A folder on the disk that the agent fills, which the verifier's own root shows too."""
INIT_PIDS = {1}
"""The init processes of the sandbox and of the agent's namespaces."""


def other_pids() -> list[int]:
    """Return every process of the sandbox except the init processes."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid not in INIT_PIDS]


def session_id(pid: int) -> int | None:
    """Return the session of a process: the process id of its command, unless it left that session."""
    fields = _stat(pid)
    return int(fields[3]) if fields else None


def count_threads(pid: int) -> int:
    """Return the number of threads of a process, which count towards the process limit."""
    fields = _stat(pid)
    return int(fields[17]) if fields else 0


def _stat(pid: int) -> list[str]:
    text = read(f"/proc/{pid}/stat")
    return text.rpartition(")")[2].split() if text else []


def process_memory(pid: int, maps_threshold: int) -> Usage:
    """Return the memory of a process.

    Args:
        maps_threshold: Bytes of address space above which its mappings are read.
    """
    text = read(f"/proc/{pid}/statm")
    if not text:
        return Usage(0)
    size, resident, shared = (int(word) * _PAGE for word in text.split()[:3])
    if size < maps_threshold:
        return Usage(resident - shared)
    maps = read(f"/proc/{pid}/maps")
    if not maps:  # unreadable: count shared memory as private
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
    """Return the text of a kernel file; "" if it is missing or unreadable. Avoids the overhead of `open`."""
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


INTERVAL_MS = 250
_IPC_RMID = 0
_libc = ctypes.CDLL(None, use_errno=True)


def memory_used() -> int:
    """Return the bytes that all processes and files in the sandbox use."""
    pids = other_pids()
    return _total_bytes({pid: process_memory(pid, 0) for pid in pids}, _segment_bytes()) + _tmpfs_bytes()


def enforce_memory_limit(
    limit: int, pids: Collection[int], protected: Collection[int] = (), *, files: bool = True
) -> str:
    """Kill the largest consumer if the processes, segments and files together use more than `limit` bytes.

    Args:
        pids: The processes.
        protected: Processes that are killed only if there are no others.
        files: Whether the root's files are in memory. Those of a layer that is being built are not.

    Returns:
        A description of the action; "" if none was needed.
    """
    # The mappings of small processes are not read; together they can hide at most a quarter of the limit.
    usage = {pid: process_memory(pid, limit // (4 * max(1, len(pids)))) for pid in pids}
    segments = _segment_bytes()
    total = _total_bytes(usage, segments) + (_tmpfs_bytes() if files else 0)
    if total <= limit:
        return ""
    victims = {pid: usage[pid].total for pid in pids if pid not in protected} or {pid: usage[pid].total for pid in pids}
    largest = max(victims, key=lambda pid: victims[pid], default=None)
    if segments and (largest is None or max(segments.values()) > victims[largest]):
        segment = max(segments, key=lambda name: segments[name])
        _libc.shmctl(segment, _IPC_RMID, None)
        action = f"shared segment {segment} was removed"
    elif largest is not None:
        _kill(largest)
        action = f"process {largest} with {victims[largest] >> 20} MB was killed"
    else:
        return ""
    return f"memory was at {total >> 20} MB of {limit >> 20} MB: {action}"


def _total_bytes(usage: dict[int, Usage], segments: dict[int, int]) -> int:
    shared: dict[str, int] = {}
    for process in usage.values():
        for key, size in process.shared.items():
            shared[key] = max(size, shared.get(key, 0))
    return sum(process.own for process in usage.values()) + sum(shared.values()) + sum(segments.values())


def _tmpfs_bytes() -> int:
    disk = os.statvfs(DISK)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def _segment_bytes() -> dict[int, int]:
    """Return the resident bytes of System V shared memory by segment id."""
    rows = [line.split() for line in read("/proc/sysvipc/shm").splitlines()[1:]]
    return {int(row[1]): int(row[14]) for row in rows if int(row[14])}


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
