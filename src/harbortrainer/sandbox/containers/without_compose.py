"""What Harbor asks Compose for, done by the daemon's own API, for a task that has no sidecars.

Compose starts a program of 60 MB for every command, a network for every trial, and a build for every trial of a task.
Here a task's image is built once in a process (by Compose, which knows BuildKit; tagged with the hash of the task's
folder), its container is one request, and every container is in one network in which none reaches another.
Contract: what is not known here is left to Compose, which finds the container by its labels.
"""

import shlex
from pathlib import Path

from aiodocker import Docker
from aiodocker.exceptions import DockerError
from harbor.environments.base import ExecResult

from harbortrainer.harbor_side.overlaid_docker import Asked, OverlaidDocker
from harbortrainer.sandbox.containers import background_end, daemon_client, exec_words
from harbortrainer.sandbox.containers.compose_service import NotTranslatedError, container_config, main_service
from harbortrainer.sandbox.containers.exec_words import ServiceCommand
from harbortrainer.sandbox.containers.lone_container import LoneContainer, compose_labels

_DONE = ExecResult(return_code=0)
_NO_SUCH = 404
_built: set[str] = set()  # the images that this process has built, or found unchanged


class WithoutCompose:
    """One environment's way around Compose."""

    def __init__(self, environment: OverlaidDocker) -> None:
        self._environment = environment
        self._client: Docker | None = None
        self._known: daemon_client.DaemonFacts
        self._container: LoneContainer | None = None

    async def do(self, asked: Asked) -> ExecResult | None:
        """Do it; None leaves it to Compose."""
        match asked.words:
            case ["build"]:
                return await self._build()
            case ["up", *_]:
                return await self._up()
        if self._container is None:
            return await self._stale() if asked.words == ["down", "--remove-orphans"] else None
        match asked.words:
            case ["exec", *_]:
                return await self._exec(self._container, asked)
            case ["cp", *_]:
                return await self._upload(self._container, asked)
            case ["down", *options]:
                await self._container.end(volumes="--volumes" in options)
                self._container = None
                return _DONE
        return None

    @property
    def container(self) -> LoneContainer | None:
        """The container, once it was started here."""
        return self._container

    async def renew(self) -> None:
        """What is asked for now is done by processes that what ran before has had no hand on."""
        if self._container is not None:
            await self._container.renew()

    async def close(self) -> None:
        """The environment has stopped. A container may stay: the user can ask Harbor to keep it."""
        await self.renew()
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _build(self) -> ExecResult | None:
        if self._config() is None:
            return None
        image = self._environment.image
        if image not in _built:  # Harbor holds a lock of the task's
            await self._environment.compose("build")
            _built.add(image)
        return _DONE

    async def _stale(self) -> ExecResult | None:
        """Before the start: a container of the same trial, of a run before, makes way."""
        if self._config() is None or not await self._opened():
            return None
        assert self._client is not None
        await background_end.finished(self._name)
        await LoneContainer(self._client, self._client.containers.container(self._name)).remove()
        return _DONE

    async def _up(self) -> ExecResult | None:
        config = self._config()
        if config is None or not await self._opened():
            return None
        assert self._client is not None
        try:
            self._container = await self._started(self._client, config)
        except DockerError as error:
            return ExecResult(stdout=error.message, return_code=1)
        return _DONE

    async def _started(self, client: Docker, config: dict) -> LoneContainer:
        try:
            return await LoneContainer.start(client, self._name, self._in_network(config))
        except DockerError as error:
            if error.status != _NO_SUCH:
                raise
        # The image was never here, or it or the network was removed since.
        await self._environment.compose("build" if self._environment.builds else "pull")
        self._known = await daemon_client.ask_again(client)
        return await LoneContainer.start(client, self._name, self._in_network(config))

    def _in_network(self, config: dict) -> dict:
        """Never without one: the daemon would take its default network, in which containers reach each other."""
        if self._known.network is None:
            raise DockerError(_NO_SUCH, f"no network {daemon_client.NETWORK} that keeps containers apart can be had")
        return config | {"HostConfig": config["HostConfig"] | {"NetworkMode": self._known.network}}

    async def _opened(self) -> bool:
        if self._client is None and (opened := await daemon_client.open_client()) is not None:
            self._client, self._known = opened
            self._environment.knows_rootless(self._known.rootless)
        return self._client is not None and self._known.network is not None

    def _config(self) -> dict | None:
        """The container's; None where the task needs Compose."""
        files = self._environment.generated_files()
        if files is None:
            return None
        try:
            config = container_config(main_service(files))
        except NotTranslatedError as reason:
            self._environment.logger.debug("by Compose: %s", reason)
            return None
        labels = config.get("Labels", {}) | compose_labels(self._environment.project)
        return config | {"Image": self._environment.image, "Labels": labels}

    @property
    def _name(self) -> str:
        return f"{self._environment.project}-{exec_words.MAIN}-1"

    async def _exec(self, container: LoneContainer, asked: Asked) -> ExecResult | None:
        command = exec_words.command_of(asked.words)
        if command is None or asked.stdin is not None:
            return None
        try:
            return await container.run(command, asked.seconds, asked.on_output)
        except TimeoutError as error:
            raise RuntimeError(f"Command timed out after {asked.seconds} seconds") from error

    async def _upload(self, container: LoneContainer, asked: Asked) -> ExecResult | None:
        """A folder's content, or a file, as `docker cp` puts it; a folder that is missing is made."""
        upload = exec_words.upload_of(asked.words)
        if upload is None:
            return None
        source, target = Path(upload[0]), upload[1]
        if upload[0].endswith("/."):
            made = await self._as_root(container, f"mkdir -p -- {shlex.quote(target)}")
            return made if made.return_code else await container.put(target, source, None)
        folder, _, name = target.rpartition("/")
        into = shlex.quote(target)
        is_folder = (await self._as_root(container, f"test -d {into}")).return_code == 0
        folder, name = (target, source.name) if is_folder or not name else (folder or "/", name)
        made = await self._as_root(container, f"mkdir -p -- {shlex.quote(folder)}")
        return made if made.return_code else await container.put(folder, source, name)

    async def _as_root(self, container: LoneContainer, text: str) -> ExecResult:
        return await container.run(ServiceCommand(["sh", "-c", text], user="0"), None, None)
