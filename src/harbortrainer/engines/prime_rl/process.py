"""Runs one child process to its end: copies its output, forwards signals and ends its process group.

Contract: `run` returns the child's exit code, 128 + n if signal n ended it. The child leads its own process group, so
that Ctrl-C reaches it only once, through this process. If this process dies, the kernel signals the child.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from harbortrainer.engines.prime_rl.stall_detector import Stall
from harbortrainer.engines.programs import terminate_with_parent
from harbortrainer.runs.log_files import LOG_BYTES

CHECK_INTERVAL_S = 2.0
"""Seconds between two stall checks."""

GRACE_S = 60.0
"""Seconds between a forwarded signal and SIGKILL; the same as Prime-RL gives its own children."""

TAIL_LINES = 200


class Child:
    """A running command.

    Args:
        command: Its arguments.
        environment: All of its environment variables.
        log: File to which its output is appended; see `rotating_log`.
        grace_s: Seconds between a signal and SIGKILL.
        check_stall: Called regularly; a child that stalls is ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        grace_s: float = GRACE_S,
        check_stall: Callable[[], Stall | None] | None = None,
    ) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.stall: Stall | None = None
        self._check_stall, self._check_at = check_stall, time.monotonic() + CHECK_INTERVAL_S
        self._log = log
        self._grace_s = grace_s
        self._signalled: float | None = None
        self.interrupted = False
        """Whether a signal from outside was forwarded."""
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=terminate_with_parent(),
        )

    @property
    def group(self) -> int:
        """Id of the child's process group."""
        return self._process.pid

    def run(self) -> int:
        """Wait until the child ends, and return its exit code."""
        reader = threading.Thread(target=self._tee, daemon=True)
        with self._forwarding():
            reader.start()
            while self._process.poll() is None:
                self._kill_after_grace()
                self._end_if_stalled()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=0.2)
        reader.join(timeout=2)
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def forward(self, number: int) -> None:
        """Send a signal to the child's process group; the second one is SIGKILL."""
        if self._signalled is not None:
            number = signal.SIGKILL
        self._signalled = self._signalled or time.monotonic()
        with suppress(ProcessLookupError):
            os.killpg(self.group, number)

    def _interrupt(self, number: int) -> None:
        self.interrupted = True
        self.forward(number)

    def _end_if_stalled(self) -> None:
        """End the child if it stalls; checked every `CHECK_INTERVAL_S` seconds, because a check takes time."""
        if self._check_stall is None or self._signalled is not None or time.monotonic() < self._check_at:
            return
        found = self._check_stall()
        self._check_at = time.monotonic() + CHECK_INTERVAL_S
        if found is not None and self._signalled is None:
            self.stall = found
            self.forward(signal.SIGTERM)

    def _kill_after_grace(self) -> None:
        if self._signalled is not None and time.monotonic() - self._signalled > self._grace_s:
            with suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)

    @contextmanager
    def _forwarding(self) -> Generator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, lambda got, _frame: self._interrupt(got)) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _tee(self) -> None:
        assert self._process.stdout is not None
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with closing(rotating_log(self._log)) as log:
            for line in self._process.stdout:
                self._copy(line.decode(errors="replace"), log)

    def _copy(self, text: str, log: logging.Handler) -> None:
        line = text.rstrip("\n")
        log.handle(logging.makeLogRecord({"msg": line}))
        self.tail.append(line)
        with suppress(OSError, ValueError):  # nobody reads it any more, or its disk is full; the log goes on
            sys.stdout.write(text)
            sys.stdout.flush()


def rotating_log(path: Path) -> RotatingFileHandler:
    """Open a log that is renamed to `NAME.1.log` before it exceeds `LOG_BYTES`.

    It takes the place of the one before. Prime-RL accepts names like `job_*.log` in the folder of a new run.
    """
    log = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
    log.namer = lambda _name: str(path.with_suffix(f".1{path.suffix}"))
    return log
