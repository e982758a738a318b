"""Runs other programs, which may be missing, and makes sure that long-running children end with this process."""

import ctypes
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Protocol

from harbortrainer.errors import RunStoppedError

_PR_SET_PDEATHSIG = 1


class WatchedProcess(Protocol):
    """A child process that the run depends on."""

    @property
    def alive(self) -> bool: ...
    def exit_error(self) -> RunStoppedError: ...


def program_output(*command: str, timeout_s: float = 20.0) -> str | None:
    """Return a program's stdout; None if it is missing, takes too long or fails."""
    done = _run(command, timeout_s)
    return done.stdout if done is not None and done.returncode == 0 else None


def error_output(*command: str) -> str:
    """Return a program's stderr; "" if it is missing or takes too long."""
    done = _run(command, timeout_s=20.0)
    return "" if done is None else done.stderr


def _run(command: Sequence[str], timeout_s: float) -> "subprocess.CompletedProcess[str] | None":
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def terminate_with_parent() -> Callable[[], object]:
    """Return a `preexec_fn` that makes the kernel send the child SIGTERM when the thread that started it ends."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
