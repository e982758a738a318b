"""Keeps a sandbox's memory in bounds where no control group can: adds up what its processes use, and ends the largest.

Coarse by nature: it looks a few times a second. The size of the files in memory is bounded by their tmpfs.
"""

import os
import signal

INTERVAL_MS = 250
_PAGE = os.sysconf("SC_PAGE_SIZE")


def enforce(limit: int) -> None:
    """Kill the process that uses most when all of them together use more than `limit` bytes."""
    used = {pid: _own_memory(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != 1}
    if used and sum(used.values()) > limit:
        try:
            os.kill(max(used, key=lambda pid: used[pid]), signal.SIGKILL)
        except ProcessLookupError:
            return


def _own_memory(pid: int) -> int:
    """Resident memory that is not a file's."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE
