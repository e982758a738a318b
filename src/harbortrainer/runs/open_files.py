"""The limit of files and sockets that a process may have open at once. Many trials in flight exceed the usual 1 024."""

import resource

_PER_TRIAL = 4
"""Files and sockets of a trial in flight (`benchmarks/scale.py` measures them)."""
_BASE = 256
"""Files and sockets of a process without trials."""
_MOST = 65_536
"""The soft limit is raised to this at most: some programs visit every number up to the limit."""


def raise_open_files_limit() -> int:
    """Raise this process's soft limit as far as the hard limit and `_MOST` allow; return the limit.

    Child processes inherit it.
    """
    soft, hard = (_MOST if x == resource.RLIM_INFINITY else x for x in resource.getrlimit(resource.RLIMIT_NOFILE))
    possible = min(hard, _MOST)
    if soft >= possible:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    except (OSError, ValueError):  # macOS has a lower limit of its own
        return soft
    return possible


def needed_open_files(trials: int) -> int:
    """Return the open files that a process with this many trials in flight needs."""
    return _BASE + _PER_TRIAL * trials


def trials_within(open_files: int) -> int:
    """Return how many trials in flight this many open files allow."""
    return max(0, open_files - _BASE) // _PER_TRIAL
