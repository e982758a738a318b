"""Container of a task without sidecars, run through the daemon's API without Compose.

Invariant: it carries Compose's labels, so that Compose and the cleanup after a run treat it as the main service of its
project.
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

from harbortrainer.sandbox.compose_files import MAIN
from harbortrainer.sandbox.containers import container_exit
from harbortrainer.sandbox.containers.container_exit import GONE_STATUSES
from harbortrainer.sandbox.containers.shell import ContainerShell, ServiceCommand, ShellResult, can_run
from harbortrainer.sandbox.errors_and_changes import SandboxStartError

_COMPOSE = "com.docker.compose."
_HEALTH_S = 0.2
_CANNOT_RUN = 126
_NOT_RUNNING = 1
_IN_MEMORY = 8 << 20


def compose_labels(project: str) -> dict[str, str]:
    """Return the labels by which Compose identifies the main service of a project."""
    labels = {"project": project, "service": MAIN, "oneoff": "False", "container-number": "1", "config-hash": "none"}
    return {_COMPOSE + name: value for name, value in labels.items()}


@dataclass
class DirectContainer:
    """A started container. Create it with `await DirectContainer.start(...)`."""

    client: Docker
    container: DockerContainer
    workdir: str = "/"
    details: dict = field(default_factory=dict)
    _shells: dict[str, list[ContainerShell]] = field(default_factory=dict)
    """Idle shells by user."""
    _users_without_bash: set[str] = field(default_factory=set)
    """Users for whom no shell can be opened."""

    @classmethod
    async def start(cls, client: Docker, name: str, config: dict) -> "DirectContainer":
        """Create and start a container, and wait until it is healthy if its image has a HEALTHCHECK.

        Raises:
            DockerError: The image does not exist (404), or the daemon refuses.
            SandboxStartError: The container ended at once or is unhealthy.
        """
        container = await client.containers.create(config, name=name)
        started = cls(client, container)
        try:
            await container.start()
            await started._wait_healthy()
            await started._open_root_shell()
        except BaseException:
            await started.remove()
            raise
        return started

    async def _wait_healthy(self) -> None:
        while True:
            self.details = await self.container.show()
            state = self.details["State"]
            health = (state.get("Health") or {}).get("Status", "healthy")
            if not state["Running"] or health == "unhealthy":
                how = "is unhealthy" if state["Running"] else f"ended with code {state['ExitCode']}"
                output = "".join(await self.container.log(stdout=True, stderr=True))[-2000:]
                raise SandboxStartError(f"the container {how} during startup: {output or state.get('Error', '')}")
            if health in ("healthy", "none"):
                break
            await asyncio.sleep(_HEALTH_S)
        self.workdir = self.details["Config"]["WorkingDir"] or "/"

    async def _open_root_shell(self) -> None:
        """Open a shell for root, which the first command uses. Fails if the container has ended meanwhile."""
        try:
            shell = await ContainerShell.open(self.container, "root")
        except DockerError:
            await self._wait_healthy()
            raise
        self._shells["root"] = [shell] if shell is not None else []

    async def run(self, command: ServiceCommand, seconds: float | None, on_output: OutputCallback | None) -> ExecResult:
        """Run a command; stdout and stderr are merged.

        Raises:
            TimeoutError: It took longer than `seconds`. It continues to run, as in Harbor's environment.
        """
        command = replace(command, user=self._user(command.user))
        try:
            async with asyncio.timeout(seconds or None):
                result = await self._run_in_shell(command) if on_output is None and can_run(command) else None
                return (
                    await self._run_exec(command, on_output) if result is None else _result(result.output, result.code)
                )
        except DockerError as error:
            return ExecResult(
                stdout=error.message, return_code=_NOT_RUNNING if error.status in GONE_STATUSES else _CANNOT_RUN
            )

    async def close_shells(self) -> None:
        """Close the idle shells, so that later commands run in new ones that no process inside has tampered with."""
        shells, self._shells = self._shells, {}
        for shell in (shell for idle in shells.values() for shell in idle):
            await shell.close()

    async def _run_in_shell(self, command: ServiceCommand) -> ShellResult | None:
        """Run a command in an idle or new shell; None if the user has no shell and nothing was run."""
        while command.user not in self._users_without_bash:
            idle = self._shells.setdefault(command.user, [])
            shell = idle.pop() if idle else await ContainerShell.open(self.container, command.user)
            if shell is None:
                self._users_without_bash.add(command.user)
                break
            result: ShellResult | None = None
            try:
                result = await shell.run(command, command.cwd or self.workdir)
            finally:  # after a timeout or cancellation the command continues, so the shell cannot be reused
                if result is None or not result.reusable:
                    await shell.close()
            if result is not None:
                if result.reusable and self._shells.get(command.user) is idle:
                    idle.append(shell)
                elif result.reusable:
                    await shell.close()
                return result
        return None

    async def _run_exec(self, command: ServiceCommand, on_output: OutputCallback | None) -> ExecResult:
        started = await self.container.exec(
            command.argv, user=command.user, environment=command.env, workdir=command.cwd
        )
        output, stream = bytearray(), started.start(detach=False)
        try:
            while (message := await stream.read_out()) is not None:
                output += message.data
                if on_output is not None:
                    await on_output(message.data.decode(errors="replace"), "stdout")
        finally:
            await stream.close()
        return _result(output, (await started.inspect())["ExitCode"] or 0)

    def _user(self, user: str) -> str:
        """Return the canonical name of a user: root's other names become "root"."""
        own = self.details["Config"]["User"] or "root"
        return "root" if (user or own) in ("root", "0") else user or own

    async def upload(self, folder: str, source: Path, name: str | None) -> ExecResult:
        """Upload the content of the folder `source`, or the file `source` under a name, into an existing folder."""
        with SpooledTemporaryFile(_IN_MEMORY) as archive:
            await asyncio.to_thread(_pack, archive, source, name)
            try:
                await self.container.put_archive(folder, _chunks(archive))
            except DockerError as error:
                return ExecResult(stdout=error.message, return_code=1)
        return ExecResult(return_code=0)

    async def download_archive(self, folder: str, archive: IO[bytes], max_bytes: int) -> bool:
        """Write an archive of a folder without running a process inside.

        Returns:
            False if the daemon refuses or the archive exceeds `max_bytes`.
        """
        # aiodocker would read the whole archive into memory, whatever its size.
        url = f"{self.client.docker_host}/{self.client.api_version}/containers/{self.container.id}/archive"
        async with self.client.session.get(url, params={"path": folder}) as response:
            if response.status != HTTPStatus.OK:
                return False
            async for chunk in response.content.iter_chunked(1 << 16):
                archive.write(chunk)
                if archive.tell() > max_bytes:
                    return False
        return True

    async def kill_and_remove(self, *, volumes: bool) -> None:
        """Kill all processes; the removal continues in the background.

        Raises:
            DockerError: The daemon refused.
            ConnectionError: The daemon does not answer.
        """
        await self.close_shells()
        name, init_pid = self.details["Name"].lstrip("/"), self.details["State"]["Pid"]
        await container_exit.kill_and_remove(self.container.id, name, init_pid, volumes=volumes)

    async def remove(self) -> None:
        """Kill and remove the container; it may already be removed."""
        await self.close_shells()
        try:
            await self.container.delete(force=True, v=True)
        except DockerError as error:
            if error.status not in GONE_STATUSES:
                raise


def _result(output: bytes | bytearray, code: int) -> ExecResult:
    return ExecResult(stdout=output.decode(errors="replace") or None, return_code=code)


async def _chunks(archive: IO[bytes]) -> AsyncIterator[bytes]:
    """Yield the file's content. Passed a file, aiohttp would close it in a thread after it was closed here."""
    while chunk := archive.read(1 << 16):
        yield chunk


def _pack(archive: IO[bytes], source: Path, name: str | None) -> None:
    """Write an archive as `docker cp` does, with the owners and modes of the files here."""
    with tarfile.open(fileobj=archive, mode="w") as tar:
        if name is not None:
            tar.add(source.resolve(), arcname=name, recursive=False)
        else:
            for path in sorted(source.iterdir()):
                tar.add(path, arcname=path.name)
    archive.seek(0)
