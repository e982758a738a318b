"""Asks other programs, without trusting that they are there, and sees to it that what we start ends with us."""

import ctypes
import signal
import subprocess
from collections.abc import Callable
from typing import Protocol

from harbortrainer.errors import RunStoppedError

_PR_SET_PDEATHSIG = 1


class WatchedProcess(Protocol):
    """A process without which nothing comes back."""

    @property
    def alive(self) -> bool: ...
    def ended(self) -> RunStoppedError: ...


def output_of(*words: str, timeout_s: float = 20.0) -> str | None:
    """What a program says on stdout; None when it is not there, takes too long or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def ends_with_us() -> Callable[[], object]:
    """A child's `preexec_fn`: the kernel sends it SIGTERM when the thread that starts it is gone."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
