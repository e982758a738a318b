"""What an image does when a container of it starts: its ENTRYPOINT runs, and its HEALTHCHECK is waited for.

As in Harbor's Docker environment the entrypoint gets `sh -c "sleep infinity"` as arguments and lives on beside what is
done in the sandbox; it ends with it.
"""

import asyncio
import contextlib
import time

from harbortrainer.sandbox.guest import Finished, Guest
from harbortrainer.sandbox.inside.messages import Command
from harbortrainer.sandbox.sandbox_errors import SandboxError, SandboxStartError
from harbortrainer.sandbox.task_image import Healthcheck, Image

_KEEP_RUNNING = ("sh", "-c", "sleep infinity")
_EARLY_S = 0.1
_BETWEEN_S = 0.25
_TAIL = 1000


class StartUp:
    """The entrypoint of one sandbox."""

    def __init__(self, guest: Guest, image: Image) -> None:
        self._guest, self._image = guest, image
        self._entrypoint: asyncio.Task[Finished] | None = None

    async def begin(self) -> None:
        """Make the working folder, start the entrypoint and wait until the sandbox is healthy.

        Raises:
            SandboxStartError: The entrypoint ended at once, or the healthcheck never came out well.
        """
        await self._make_workdir()
        if self._image.entrypoint:
            running = self._guest.run(self._command([*self._image.entrypoint, *_KEEP_RUNNING]))
            self._entrypoint = asyncio.create_task(running)
            await asyncio.wait([self._entrypoint], timeout=_EARLY_S)
            self._check_running()
        if self._image.healthcheck is not None:
            await self._wait_for(self._image.healthcheck)

    async def end(self) -> None:
        """Called when the sandbox has ended: forget the entrypoint."""
        if self._entrypoint is not None:
            self._entrypoint.cancel()
            with contextlib.suppress(asyncio.CancelledError, SandboxError):
                await self._entrypoint

    async def _make_workdir(self) -> None:
        """Builders leave the folders of WORKDIR to whoever starts a container."""
        for folder in dict.fromkeys([*self._image.folders, self._image.workdir]):
            if (await self._guest.run(Command(["is", "d", folder], call=True))).code:
                await self._guest.run(Command(["/bin/sh", "-c", 'mkdir -p "$0"', folder], env=self._image.env))

    def _command(self, argv: list[str]) -> Command:
        image = self._image
        return Command(argv, cwd=image.workdir, env=image.env, user=image.user)

    def _check_running(self) -> None:
        if self._entrypoint is not None and self._entrypoint.done():
            done = self._entrypoint.result()
            said = _said(done) or "nothing"
            raise SandboxStartError(f"the image's ENTRYPOINT ended at once with code {done.code} and said {said}")

    async def _wait_for(self, check: Healthcheck) -> None:
        until = time.monotonic() + check.within_s
        while True:
            said = await self._try(check)
            if said is None:
                return
            self._check_running()
            if time.monotonic() >= until:
                raise SandboxStartError(f"the image's HEALTHCHECK failed for {check.within_s:.0f} s: {said}")
            await asyncio.sleep(_BETWEEN_S)

    async def _try(self, check: Healthcheck) -> str | None:
        """None when it came out well, else what it said."""
        try:
            done = await self._guest.run(self._command(check.argv), seconds=check.timeout_s)
        except TimeoutError:
            return f"it did not end within {check.timeout_s:.0f} s"
        return None if done.code == 0 else f"code {done.code}: {_said(done)}"


def _said(done: Finished) -> str:
    return (done.stdout + done.stderr).decode(errors="replace").strip()[-_TAIL:]
