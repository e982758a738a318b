"""Start of an image's container: its ENTRYPOINT runs, and its HEALTHCHECK has to pass.

As in Harbor's Docker environment, the entrypoint gets the arguments `sh -c "sleep infinity"`. It runs until the sandbox
ends.
"""

import asyncio
import contextlib
import time

from harbortrainer.sandbox.errors_and_changes import SandboxError, SandboxStartError
from harbortrainer.sandbox.inside.messages import Command
from harbortrainer.sandbox.running_sandbox import CommandResult, RunningSandbox
from harbortrainer.sandbox.task_image import Healthcheck, Image

_KEEP_RUNNING = ("sh", "-c", "sleep infinity")
_EARLY_EXIT_S = 0.1
_CHECK_INTERVAL_S = 0.25
_TAIL_CHARS = 1000


async def make_workdir(sandbox: RunningSandbox, image: Image) -> None:
    """Create the folders of WORKDIR, which builders leave to the start of a container."""
    for folder in dict.fromkeys([*image.folders, image.workdir]):
        if (await sandbox.run(Command(["is", "d", folder], call=True))).code:
            await sandbox.run(Command(["/bin/sh", "-c", 'mkdir -p "$0"', folder], env=image.env))


class EntrypointProcess:
    """ENTRYPOINT process of one sandbox."""

    def __init__(self, sandbox: RunningSandbox, image: Image) -> None:
        self._sandbox, self._image = sandbox, image
        self._entrypoint: asyncio.Task[CommandResult] | None = None

    async def start(self) -> None:
        """Create the working folder, start the entrypoint and wait until the sandbox is healthy.

        Raises:
            SandboxStartError: The entrypoint ended at once, or the health check did not pass in time.
        """
        await make_workdir(self._sandbox, self._image)
        if self._image.entrypoint:
            running = self._sandbox.run(self._command([*self._image.entrypoint, *_KEEP_RUNNING]))
            self._entrypoint = asyncio.create_task(running)
            await asyncio.wait([self._entrypoint], timeout=_EARLY_EXIT_S)
            self._check_running()
        if self._image.healthcheck is not None:
            await self._wait_healthy(self._image.healthcheck)

    async def stop(self) -> None:
        """Discard the entrypoint's task, after the sandbox has ended."""
        if self._entrypoint is not None:
            self._entrypoint.cancel()
            with contextlib.suppress(asyncio.CancelledError, SandboxError):
                await self._entrypoint

    def _command(self, argv: list[str]) -> Command:
        image = self._image
        return Command(argv, cwd=image.workdir, env=image.env, user=image.user)

    def _check_running(self) -> None:
        if self._entrypoint is not None and self._entrypoint.done():
            done = self._entrypoint.result()
            output = done.tail(_TAIL_CHARS) or "nothing"
            raise SandboxStartError(f"the image's ENTRYPOINT ended at once with code {done.code} and printed {output}")

    async def _wait_healthy(self, check: Healthcheck) -> None:
        until = time.monotonic() + check.within_s
        while True:
            output = await self._check_health(check)
            if output is None:
                return
            self._check_running()
            if time.monotonic() >= until:
                raise SandboxStartError(f"the image's HEALTHCHECK failed for {check.within_s:.0f} s: {output}")
            await asyncio.sleep(_CHECK_INTERVAL_S)

    async def _check_health(self, check: Healthcheck) -> str | None:
        """Run the check once. Return None if it passed, else a description of the failure."""
        try:
            done = await self._sandbox.run(self._command(check.argv), seconds=check.timeout_s)
        except TimeoutError:
            return f"it did not end within {check.timeout_s:.0f} s"
        return None if done.code == 0 else f"code {done.code}: {done.tail(_TAIL_CHARS)}"
