"""Sandboxes with failures, for use by import path."""

import asyncio
from typing import Any, ClassVar

import httpx
from harbor.environments.base import ExecResult
from patience import HANG_S, wait_until
from simulated_provider import RateLimitException, SimulatedSandbox

from harbortrainer.sandbox.errors_and_changes import SandboxStartError
from harbortrainer.sandbox.local import LocalEnvironment


class WillNotStart(LocalEnvironment):
    """Never starts."""

    async def start(self, force_build: bool) -> None:
        raise SandboxStartError("no room for another sandbox")


class TimeoutException(Exception):  # noqa: N818 - as e2b names it
    """Nothing of Python's own."""


class OwnTimeouts(LocalEnvironment):
    """Has an exception of its own for a command beyond its limit, as Harbor's providers have."""

    async def exec(self, command: str, *args: Any, **kwargs: Any) -> ExecResult:
        try:
            return await super().exec(command, *args, **kwargs)
        except RuntimeError as error:
            raise TimeoutException("the request was cancelled") from error.__cause__


class NumbersItsStarts(LocalEnvironment):
    """Writes into /start-number how many sandboxes started before it, to simulate a change between trials."""

    starts = 0

    async def start(self, force_build: bool) -> None:
        await super().start(force_build)
        NumbersItsStarts.starts += 1
        await self.exec(f"echo {self.starts} > /start-number", user="root")


class StartsTheSecondTime(LocalEnvironment):
    """The first sandbox of the process fails to start; all others start."""

    failed = False

    async def start(self, force_build: bool) -> None:
        if not StartsTheSecondTime.failed:
            StartsTheSecondTime.failed = True
            raise SandboxStartError("no room for another sandbox")
        await super().start(force_build)


class LosesItsFolder(LocalEnvironment):
    """Moves the folder of all trials away while several are in progress.

    The sandbox of `b` does so when it stops, once that of `c` is stopping and that of `d` has started. The sandbox of
    `c` then waits until a task is cancelled.
    """

    started: ClassVar[list[str]] = []
    ended: ClassVar[list[str]] = []

    async def start(self, force_build: bool) -> None:
        await super().start(force_build)
        self.started.append(self.environment_name)

    async def stop(self, delete: bool) -> None:
        await super().stop(delete)
        self.ended.append(self.environment_name)
        if self.environment_name == "b":
            await asyncio.to_thread(wait_until, lambda: "c" in self.ended and "d" in self.started)
            kept = self.trial_paths.trial_dir.parent
            kept.rename(kept.with_name("moved"))
        if self.environment_name == "c":
            async with asyncio.timeout(HANG_S):
                # A thread would outlive the test, and nothing announces a cancellation.
                while not any(task.cancelling() for task in asyncio.all_tasks()):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


class RaisesAt(SimulatedSandbox):
    """A simulated sandbox whose commands that contain `at` raise the error of a provider or of its HTTP client.

    A check of the terminal says that it was closed, as if the sandbox were gone.
    """

    def __init__(self, *args: Any, at: str, error: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.at, self.error = at, {"ReadTimeout": httpx.ReadTimeout, "RateLimitException": RateLimitException}[error]

    async def exec(self, command: str, *args: Any, **kwargs: Any) -> ExecResult:
        if self.at in command:
            raise self.error("the provider is busy")
        if "has-session" in command:
            return ExecResult(return_code=1)
        return await super().exec(command, *args, **kwargs)


class RefusesStarts(SimulatedSandbox):
    """A provider that refuses the first two starts, and asks to wait a tenth of a second."""

    refused = 0

    async def start(self, force_build: bool) -> None:
        if RefusesStarts.refused < 2:
            RefusesStarts.refused += 1
            error = RateLimitException("429 Too Many Requests")
            error.headers = {"Retry-After": "0.1"}
            raise error
        await super().start(force_build)


class HangsOnce(SimulatedSandbox):
    """A provider whose first start does not end."""

    hung = False

    async def start(self, force_build: bool) -> None:
        if not HangsOnce.hung:
            HangsOnce.hung = True
            await asyncio.Event().wait()
        await super().start(force_build)


class RefusesVerifierStarts(SimulatedSandbox):
    """A provider that refuses the first start of a separate verifier's sandbox."""

    refused = False

    async def start(self, force_build: bool) -> None:
        if "__verifier__" in self.session_id and not RefusesVerifierStarts.refused:
            RefusesVerifierStarts.refused = True
            raise RateLimitException("429 Too Many Requests")
        await super().start(force_build)
