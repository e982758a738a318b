"""Waiting for other processes."""

import time
from collections.abc import Callable

HANG_S = 60.0
"""What takes longer hangs; a busy machine is ten times as slow as a quiet one."""


def wait_until(holds: Callable[[], object], says: Callable[[], object] = lambda: "", within: float = HANG_S) -> None:
    """Wait until a condition holds; fail after a timeout with the text of `says`."""
    until = time.monotonic() + within
    while not holds():
        assert time.monotonic() < until, says()
        time.sleep(0.05)
