"""Which session the kernel runs first: that of the processes that serve trials, before those of the sandboxes."""

import contextlib
from collections.abc import Generator
from pathlib import Path

_AUTOGROUP = Path("/proc/self/autogroup")
_NICE = -10


@contextlib.contextmanager
def before_sandboxes() -> Generator[None]:
    """Give this process's session more of a busy processor than other sessions, until the context is left.

    Where the kernel has autogroups (sched(7)), a session has one share, however many of its threads are waiting, and
    each command in a sandbox is a session: the thread that all of them wait for would get one share among dozens.

    Only root may. Without the right, or without autogroups, nothing happens.
    """
    try:
        *_, before = _AUTOGROUP.read_text().split()
        _AUTOGROUP.write_text(str(_NICE))
    except (OSError, ValueError):  # no such file, not ours to write, or empty: a session that has no group
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _AUTOGROUP.write_text(before)
