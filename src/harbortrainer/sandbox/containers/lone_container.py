"""A container of a task without sidecars, by the daemon's own API: Compose is not asked.

Invariant: it carries the labels that Compose's containers carry, so that Compose, and whoever clears away after a run,
takes it for the main service of its project.
"""

import asyncio
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO

from aiodocker import Docker
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError
from harbor.environments.base import ExecResult, OutputCallback

from harbortrainer.sandbox.containers import background_end
from harbortrainer.sandbox.containers.background_end import GONE
from harbortrainer.sandbox.containers.exec_words import MAIN, ServiceCommand
from harbortrainer.sandbox.containers.inner_shell import InnerShell, Ran, can_run
from harbortrainer.sandbox.sandbox_errors import SandboxStartError

_COMPOSE = "com.docker.compose."
_HEALTH_S = 0.2
_CANNOT_RUN = 126
_NOT_RUNNING = 1
_IN_MEMORY = 8 << 20


def compose_labels(project: str) -> dict[str, str]:
    """The labels by which Compose knows the main service of a project."""
    labels = {"project": project, "service": MAIN, "oneoff": "False", "container-number": "1", "config-hash": "none"}
    return {_COMPOSE + name: value for name, value in labels.items()}


@dataclass
class LoneContainer:
    """A container that was started. Make it with `await LoneContainer.start(...)`."""

    client: Docker
    container: DockerContainer
    workdir: str = "/"
    details: dict = field(default_factory=dict)
    _shells: dict[str, list[InnerShell]] = field(default_factory=dict)
    """Those that run nothing, by user."""
    _without: set[str] = field(default_factory=set)
    """The users who have no shell."""

    @classmethod
    async def start(cls, client: Docker, name: str, config: dict) -> "LoneContainer":
        """Create and start it, and wait until it is healthy, where its image says how one knows.

        Raises:
            DockerError: There is no such image (404), or the daemon refuses.
            SandboxStartError: It ended at once, or is not healthy.
        """
        container = await client.containers.create(config, name=name)
        made = cls(client, container)
        try:
            await container.start()
            await made._wait_until_it_runs()
            await made._open_a_shell()
        except BaseException:
            await made.remove()
            raise
        return made

    async def _wait_until_it_runs(self) -> None:
        while True:
            self.details = await self.container.show()
            state = self.details["State"]
            health = (state.get("Health") or {}).get("Status", "healthy")
            if not state["Running"] or health == "unhealthy":
                how = "is unhealthy" if state["Running"] else f"ended with code {state['ExitCode']}"
                said = "".join(await self.container.log(stdout=True, stderr=True))[-2000:]
                raise SandboxStartError(f"the container {how} at its start: {said or state.get('Error', '')}")
            if health in ("healthy", "none"):
                break
            await asyncio.sleep(_HEALTH_S)
        self.workdir = self.details["Config"]["WorkingDir"] or "/"

    async def _open_a_shell(self) -> None:
        """Root's, who is asked for first. A container that has ended meanwhile shows here."""
        try:
            shell = await InnerShell.open(self.container, "root")
        except DockerError:
            await self._wait_until_it_runs()
            raise
        self._shells["root"] = [shell] if shell is not None else []

    async def run(self, command: ServiceCommand, seconds: float | None, on_output: OutputCallback | None) -> ExecResult:
        """Run a command, with what it says to both its outputs in one.

        Raises:
            TimeoutError: It took longer than `seconds`; it goes on, as in Harbor's.
        """
        command = replace(command, user=self._user(command.user))
        try:
            async with asyncio.timeout(seconds or None):
                ran = await self._in_shell(command) if on_output is None and can_run(command) else None
                return await self._by_exec(command, on_output) if ran is None else _result(ran.said, ran.code)
        except DockerError as error:
            return ExecResult(stdout=error.message, return_code=_NOT_RUNNING if error.status in GONE else _CANNOT_RUN)

    async def renew(self) -> None:
        """Whatever was done to the shells inside, what is asked for now is done by others."""
        shells, self._shells = self._shells, {}
        for shell in (shell for idle in shells.values() for shell in idle):
            await shell.close()

    async def _in_shell(self, command: ServiceCommand) -> Ran | None:
        """None where the user has no shell: nothing was run."""
        while command.user not in self._without:
            idle = self._shells.setdefault(command.user, [])
            shell = idle.pop() if idle else await InnerShell.open(self.container, command.user)
            if shell is None:
                self._without.add(command.user)
                break
            ran: Ran | None = None
            try:
                ran = await shell.run(command, command.cwd or self.workdir)
            finally:  # out of time or cancelled: the command goes on without us
                if ran is None or not ran.reusable:
                    await shell.close()
            if ran is not None:
                if ran.reusable and self._shells.get(command.user) is idle:
                    idle.append(shell)
                elif ran.reusable:
                    await shell.close()
                return ran
        return None

    async def _by_exec(self, command: ServiceCommand, on_output: OutputCallback | None) -> ExecResult:
        started = await self.container.exec(
            command.argv, user=command.user, environment=command.env, workdir=command.cwd
        )
        said, stream = bytearray(), started.start(detach=False)
        try:
            while (message := await stream.read_out()) is not None:
                said += message.data
                if on_output is not None:
                    await on_output(message.data.decode(errors="replace"), "stdout")
        finally:
            await stream.close()
        return _result(said, (await started.inspect())["ExitCode"] or 0)

    def _user(self, user: str) -> str:
        """The same name for the same user."""
        own = self.details["Config"]["User"] or "root"
        return "root" if (user or own) in ("root", "0") else user or own

    async def put(self, folder: str, source: Path, name: str | None) -> ExecResult:
        """Put what is in the folder `source`, or the file under a name, into a folder that is there."""
        with SpooledTemporaryFile(_IN_MEMORY) as archive:
            await asyncio.to_thread(_pack, archive, source, name)
            try:
                await self.container.put_archive(folder, _chunks(archive))
            except DockerError as error:
                return ExecResult(stdout=error.message, return_code=1)
        return ExecResult(return_code=0)

    async def copy_out(self, folder: str, archive: IO[bytes], most: int) -> bool:
        """Write an archive of a folder; false when it cannot be, or grows beyond `most` bytes. Nothing runs inside."""
        # aiodocker would take all of it into memory, however much somebody inside has put there.
        place = f"{self.client.docker_host}/{self.client.api_version}/containers/{self.container.id}/archive"
        async with self.client.session.get(place, params={"path": folder}) as answer:
            if answer.status != HTTPStatus.OK:
                return False
            async for chunk in answer.content.iter_chunked(1 << 16):
                archive.write(chunk)
                if archive.tell() > most:
                    return False
        return True

    async def end(self, *, volumes: bool) -> None:
        """End what runs in it; its remains are removed while other work goes on.

        Raises:
            DockerError: The daemon refused.
            ConnectionError: It does not answer.
        """
        await self.renew()
        name, first = self.details["Name"].lstrip("/"), self.details["State"]["Pid"]
        await background_end.end(self.container.id, name, first, volumes=volumes)

    async def remove(self, *, volumes: bool = True) -> None:
        """End it and remove it; it may be gone."""
        await self.renew()
        try:
            await self.container.delete(force=True, v=volumes)
        except DockerError as error:
            if error.status not in GONE:
                raise


def _result(said: bytes | bytearray, code: int) -> ExecResult:
    return ExecResult(stdout=said.decode(errors="replace") or None, return_code=code)


async def _chunks(archive: IO[bytes]) -> AsyncIterator[bytes]:
    """Not the file itself, which aiohttp would close, in a thread, after it was closed here."""
    while chunk := archive.read(1 << 16):
        yield chunk


def _pack(archive: IO[bytes], source: Path, name: str | None) -> None:
    """As `docker cp` does: owners and modes as they are here."""
    with tarfile.open(fileobj=archive, mode="w") as tar:
        if name is not None:
            tar.add(source.resolve(), arcname=name, recursive=False)
        else:
            for path in sorted(source.iterdir()):
                tar.add(path, arcname=path.name)
    archive.seek(0)
