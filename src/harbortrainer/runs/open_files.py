"""The limit of files and sockets that a process may have open at once. Many trials in flight exceed the usual 1 024."""

import resource

PER_TRIAL = 4
"""Files and sockets of a trial in flight (`benchmarks/scale.py` measures them)."""
BASE = 256
"""Files and sockets of a process without trials."""
_MOST = 65_536
"""The soft limit is raised to this at most: some programs visit every number up to the limit."""


def raise_open_files_limit() -> int:
    """Raise this process's soft limit as far as the hard limit and `_MOST` allow; return the limit.

    Child processes inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= possible:
        return _MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    return possible


def needed_open_files(trials: int) -> int:
    """Return the open files that a process with this many trials in flight needs."""
    return BASE + PER_TRIAL * trials
