"""A simulated sandbox provider: a Harbor environment, `simulated_provider:SimulatedSandbox`, whose sandboxes only wait.

A sandbox takes as long as a remote one: its start has a median of 0.6 s and a 99th percentile of 8 s, and each request
takes 80 ms. Nothing that a model or a task writes is run. A command `echo N > /app/answer` is remembered, and the
verifier of that sandbox then gives the reward N / 1000, so a reward that belongs to another trial is noticed.

`Faults` makes the provider fail, at random for each request.
"""

import asyncio
import json
import math
import os
import random
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, override

from harbor.environments.base import BaseEnvironment, ExecResult
from meters import Stall

from harbortrainer.runs.locks import waiting_lock

START_MEDIAN_S, START_P99_S, REQUEST_S = 0.6, 8.0, 0.08
_TICK_S = 0.01
_START_SIGMA = math.log(START_P99_S / START_MEDIAN_S) / 2.326
"""Standard deviation of the start's logarithm; 2.326 is the normal distribution's 99th percentile."""

_ANSWER = re.compile(r"echo (\d+) > /app/answer")
_SLEEP = re.compile(r"sleep (\d+\.\d+); ")
_SCREEN = re.compile(r"display-message -p (\S+)")
_SCREENFUL = "\n".join(f"-rw-r--r-- 1 root root {size} file-{size}" for size in range(1000, 1020))
_TESTS = "/tests/test.sh"


class RateLimitException(Exception):  # noqa: N818 - as a provider's client names it
    """The provider refuses a request (429)."""

    status_code = 429
    headers: dict[str, str] = {"Retry-After": "1"}  # noqa: RUF012 - never changed in place


class ReadTimeout(Exception):  # noqa: N818 - as httpx names it
    """The provider did not answer a request in time."""


@dataclass(frozen=True)
class Faults:
    """Faults of the provider; each share is between 0 and 1."""

    start_fails: float = 0.0
    """Share of the starts that raise after their usual time."""
    start_hangs: float = 0.0
    command_raises: float = 0.0
    """Share of the commands that raise; a trial runs one a turn, and about ten more."""
    stop_raises: float = 0.0
    stop_hangs: float = 0.0
    starts_per_s: int = 0
    """Starts that the provider accepts a second, over all processes that share the journal's folder; 0 for no limit."""


@dataclass
class Tally:
    """Seconds that one sandbox waited, and the time of its life."""

    asked_s: float = 0.0
    made: float = field(default_factory=time.monotonic)


class SimulatedSandbox(BaseEnvironment):
    """One simulated sandbox. Takes the arguments of Harbor's environments and those below.

    Args:
        scale: Factor of all waits; tests use a small one.
        faults: Fields of `Faults`.
        journal: Folder in which each process writes a line for each sandbox that was stopped; None for no journal. With
            it, the provider fails only while the folder has a file `faults`.
    """

    _stall: ClassVar[Stall] = Stall()
    _watched: ClassVar[bool] = False

    def __init__(
        self,
        *args: object,
        scale: float = 1.0,
        faults: dict[str, float] | None = None,
        journal: str | None = None,
        **kwargs: object,
    ) -> None:
        self.scale, self.faults, self.tally = scale, Faults(**(faults or {})), Tally()  # ty: ignore[invalid-argument-type]
        self.journal = Path(journal) if journal else None
        self.answer: int | None = None
        self.graded = self.stopped = False
        super().__init__(*args, **kwargs)  # ty: ignore[invalid-argument-type]
        self.luck = random.Random()

    @staticmethod
    @override
    def type() -> str:
        return "simulated"

    @override
    def _validate_definition(self) -> None:
        return

    @override
    async def start(self, force_build: bool) -> None:
        if self.journal is not None and not self._watched:
            SimulatedSandbox._watched = True
            self._stall.watch(_TICK_S)
        if self._accepted_starts_are_used_up():
            raise RateLimitException("429 Too Many Requests")
        if self._unlucky(self.faults.start_hangs):
            await asyncio.Event().wait()
        await self._wait(self.luck.lognormvariate(math.log(START_MEDIAN_S), _START_SIGMA))
        if self._unlucky(self.faults.start_fails):
            raise ConnectionError("the provider has no capacity")

    @override
    async def stop(self, delete: bool) -> None:
        if self._unlucky(self.faults.stop_hangs):
            await asyncio.Event().wait()
        await self._wait(REQUEST_S)
        if self._unlucky(self.faults.stop_raises):
            raise ReadTimeout("the provider did not answer the stop")
        if not self.stopped:
            self.stopped = True
            self._write_journal()

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        await self._wait(REQUEST_S + sum(float(inside) for inside in _SLEEP.findall(command)))
        if self._unlucky(self.faults.command_raises):
            raise ReadTimeout("the provider did not answer the command")
        if found := _ANSWER.search(command):
            self.answer = int(found[1])
        self.graded = self.graded or (_TESTS in command and not command.startswith("chmod"))
        if mark := _SCREEN.search(command):
            return ExecResult(stdout=f"{_SCREENFUL}\n{mark[1]}\n{_SCREENFUL}\n", return_code=0)
        return ExecResult(stdout="", stderr="", return_code=0)

    @override
    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        await self._wait(REQUEST_S)
        return False

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._wait(REQUEST_S)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._wait(REQUEST_S)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._wait(REQUEST_S)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._wait(REQUEST_S)
        if self.graded and source_dir.endswith("verifier") and self.answer is not None:
            await asyncio.to_thread(Path(target_dir, "reward.txt").write_text, str(self.answer / 1000))

    async def _wait(self, seconds: float) -> None:
        self.tally.asked_s += seconds * self.scale
        await asyncio.sleep(seconds * self.scale)

    def _unlucky(self, share: float) -> bool:
        return share > 0 and self._fails and self.luck.random() < share

    @property
    def _fails(self) -> bool:
        return self.journal is None or (self.journal / "faults").exists()

    def _accepted_starts_are_used_up(self) -> bool:
        """Count this start in a file that all processes share."""
        if not self.faults.starts_per_s or not self._fails:
            return False
        folder = self.journal or Path(tempfile.gettempdir())
        with waiting_lock(folder / "starts.lock"):
            counted = folder / "starts"
            second, count = map(int, counted.read_text().split()) if counted.exists() else (0, 0)
            now = int(time.time())
            count = count + 1 if second == now else 1
            counted.write_text(f"{now} {count}")
        return count > self.faults.starts_per_s

    def _write_journal(self) -> None:
        if self.journal is None:
            return
        line = {
            "trial": self.session_id.removesuffix("__env"),
            "wall_s": time.monotonic() - self.tally.made,
            "asked_s": self.tally.asked_s,
            "stall_s": self._stall.longest_s,
        }
        with (self.journal / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
