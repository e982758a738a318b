"""Sandboxes that fail, named by import path."""

import asyncio
from typing import ClassVar

from patience import wait_until

from harbortrainer.sandbox.local import LocalEnvironment
from harbortrainer.sandbox.sandbox_errors import SandboxStartError


class WillNotStart(LocalEnvironment):
    """Fails before there is anything to run in."""

    async def start(self, force_build: bool) -> None:
        raise SandboxStartError("no room for another sandbox")


class NumbersItsStarts(LocalEnvironment):
    """Each sandbox finds in /start-number how many there were before it: what changes while nobody looks."""

    starts = 0

    async def start(self, force_build: bool) -> None:
        await super().start(force_build)
        NumbersItsStarts.starts += 1
        await self.exec(f"echo {self.starts} > /start-number", user="root")


class StartsTheSecondTime(LocalEnvironment):
    """The first sandbox of the process fails, all others start."""

    failed = False

    async def start(self, force_build: bool) -> None:
        if not StartsTheSecondTime.failed:
            StartsTheSecondTime.failed = True
            raise SandboxStartError("no room for another sandbox")
        await super().start(force_build)


class LosesItsFolder(LocalEnvironment):
    """All trials' folder is moved away at the end of the sandbox of `b`, which lasts until `a` has passed, that of `d`
    is there and that of `c` is ending, which lasts until somebody is cancelled."""

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
            loop = asyncio.get_running_loop()
            await asyncio.to_thread(wait_until, lambda: any(task.cancelling() for task in asyncio.all_tasks(loop)))
