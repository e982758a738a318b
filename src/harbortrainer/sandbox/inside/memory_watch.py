"""Keeps a sandbox's memory in bounds where no control group can: adds up all that lives in it, and ends the largest.

Everything counts, whoever started it and whether a command runs or not: what processes have for themselves, memory that
they share (mapped without a file, System V's), and the files in memory, which are the sandbox's disk. Files in memory
without a name (memfd) could be hidden from this, so `seccomp` refuses them where this watch is needed.

Coarse by nature: it looks a few times a second. Invariant: the first process is never a victim.
"""

import ctypes
import os
import signal
from collections.abc import Collection

from harbortrainer.sandbox.inside import processes

INTERVAL_MS = 250
_IPC_RMID = 0
_libc = ctypes.CDLL(None, use_errno=True)


def used() -> int:
    """Bytes that everything in the sandbox uses."""
    pids = processes.others()
    return _total({pid: processes.memory(pid, 0) for pid in pids}, _segments()) + _files()


def enforce(limit: int, pids: Collection[int], spared: Collection[int] = (), *, files: bool = True) -> str:
    """End the largest consumer when all of them together use more than `limit` bytes.

    Args:
        pids: The processes.
        spared: Those that are ended only when no others are left.
        files: Whether the root's files lie in memory; those of a layer that is being built do not.

    Returns:
        What was done, in words; "" when nothing had to be.
    """
    # Of a process that is too small to matter only its own memory is read: a quarter of the limit may hide in those.
    usage = {pid: processes.memory(pid, limit // (4 * max(1, len(pids)))) for pid in pids}
    segments = _segments()
    total = _total(usage, segments) + (_files() if files else 0)
    if total <= limit:
        return ""
    victims = {pid: usage[pid].total for pid in pids if pid not in spared} or {pid: usage[pid].total for pid in pids}
    largest = max(victims, key=lambda pid: victims[pid], default=None)
    if segments and (largest is None or max(segments.values()) > victims[largest]):
        segment = max(segments, key=lambda name: segments[name])
        _libc.shmctl(segment, _IPC_RMID, None)
        done = f"shared segment {segment} was removed"
    elif largest is not None:
        _kill(largest)
        done = f"process {largest} with {victims[largest] >> 20} MB was killed"
    else:
        return ""
    return f"memory was at {total >> 20} MB of {limit >> 20} MB: {done}"


def _total(usage: dict[int, processes.Usage], segments: dict[int, int]) -> int:
    shared: dict[str, int] = {}
    for one in usage.values():
        for key, size in one.shared.items():
            shared[key] = max(size, shared.get(key, 0))
    return sum(one.own for one in usage.values()) + sum(shared.values()) + sum(segments.values())


def _files() -> int:
    disk = os.statvfs("/")
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def _segments() -> dict[int, int]:
    """Resident bytes of System V's shared memory, by its number."""
    rows = [line.split() for line in processes.read("/proc/sysvipc/shm").splitlines()[1:]]
    return {int(row[1]): int(row[14]) for row in rows if int(row[14])}


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
