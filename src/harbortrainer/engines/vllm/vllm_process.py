"""The process of `vllm serve`, from its start to its end.

Contract: it leads a process group of its own, which is ended whole; when this process is killed the kernel tells it.
It is reaped by `stop` alone, so that until then its number can be nobody else's.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from harbortrainer.engines.programs import ends_with_us
from harbortrainer.errors import RunStoppedError

LOOK_S = 0.2
LAST_LINES = 3
"""Of the log, for the message."""


class VllmProcess:
    """A running `vllm serve`. Start it from a thread that lives as long as it shall: the main one.

    Args:
        words: The command.
        variables: Environment variables beside this process's own.
        log: File for what it says.
    """

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._said = log.stat().st_size if log.exists() else 0
        with log.open("ab") as said:
            self._process = subprocess.Popen(
                list(words),
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=ends_with_us(),
            )

    @property
    def pid(self) -> int:
        """Its number, and its group's."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait_until(self, ready: Callable[[], bool], within: float) -> None:
        """Return once `ready` says so.

        Raises:
            RunStoppedError: It ended, or took longer than `within` seconds; with its last lines.
        """
        end = time.monotonic() + within
        while not ready():
            if not self.alive:
                raise self.ended()
            if time.monotonic() > end:
                raise self._failure(f"was not ready after {within:.0f} s")
            time.sleep(LOOK_S)

    def ended(self) -> RunStoppedError:
        """The error of a vLLM that is gone."""
        return self._failure("ended")

    def _failure(self, what: str) -> RunStoppedError:
        with self.log.open("rb") as log:
            log.seek(self._said)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        last = " | ".join(lines[-LAST_LINES:])[-600:] if lines else "it said nothing"
        return RunStoppedError(f"vllm serve {what}: {last}", do=f"see {self.log}")

    def ask_to_end(self) -> None:
        """Tell its group to end, and do not wait."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)

    def stop(self, within: float) -> None:
        """End it with all that it started; kill what is left after `within` seconds. Safe to call twice."""
        if self._process.returncode is not None:
            return
        self.ask_to_end()
        end = time.monotonic() + within
        while self.alive and time.monotonic() < end:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
