"""Runs one child to its end: output teed, signals forwarded, nobody of it left.

Contract: `run` returns the child's exit code (128 + n for a child that signal n ended). The child leads a process
group of its own, so that Ctrl-C reaches it once, through us; when this process dies the kernel tells the child.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from harbortrainer.engines.prime_rl.standstill import Standstill
from harbortrainer.engines.programs import ends_with_us

LOOK_S = 2.0
"""Seconds between two looks at what the child does."""

GRACE_S = 60.0
"""Seconds between a forwarded signal and the end of patience; Prime-RL gives its own children as long."""

TAIL_LINES = 200


class Child:
    """A running command.

    Args:
        command: Its words.
        environment: Its variables, all of them.
        log: File its output is added to.
        grace_s: Seconds it gets to end after a signal.
        look: Asked now and then whether it stands still; if it does, it is ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        grace_s: float = GRACE_S,
        look: Callable[[], Standstill | None] | None = None,
    ) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.standstill: Standstill | None = None
        self._look, self._look_at = look, time.monotonic() + LOOK_S
        self._log = log
        self._grace_s = grace_s
        self._signalled: float | None = None
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ends_with_us(),
        )

    @property
    def group(self) -> int:
        """The process group that the child leads."""
        return self._process.pid

    @property
    def interrupted(self) -> bool:
        """Whether a signal was forwarded, one from outside."""
        return self._signalled is not None and self.standstill is None

    def run(self) -> int:
        """Wait for the end."""
        reader = threading.Thread(target=self._tee, daemon=True)
        with self._forwarding():
            reader.start()
            while self._process.poll() is None:
                self._lose_patience()
                self._watch()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=0.2)
        reader.join(timeout=2)
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def forward(self, number: int) -> None:
        """Give a signal to the child's group; the second one ends it at once."""
        if self._signalled is not None:
            number = signal.SIGKILL
        self._signalled = self._signalled or time.monotonic()
        with suppress(ProcessLookupError):
            os.killpg(self.group, number)

    def _watch(self) -> None:
        """End the child when it stands still; a look may take a moment, so there are not many."""
        if self._look is None or self._signalled is not None or time.monotonic() < self._look_at:
            return
        found = self._look()
        self._look_at = time.monotonic() + LOOK_S
        if found is not None and self._signalled is None:
            self.standstill = found
            self.forward(signal.SIGTERM)

    def _lose_patience(self) -> None:
        if self._signalled is not None and time.monotonic() - self._signalled > self._grace_s:
            with suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)

    @contextmanager
    def _forwarding(self) -> Generator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, lambda got, _frame: self.forward(got)) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _tee(self) -> None:
        assert self._process.stdout is not None
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            for line in self._process.stdout:
                self._copy(line, log)

    def _copy(self, line: bytes, log: BinaryIO) -> None:
        log.write(line)
        log.flush()
        text = line.decode(errors="replace")
        self.tail.append(text.rstrip("\n"))
        sys.stdout.write(text)
        sys.stdout.flush()
