"""Harbor's Compose commands, run through the daemon's API for tasks without sidecars.

Compose starts a 60 MB program for every command, a network for every trial, and a build for every trial. Here an image
is built once per process (by Compose, for BuildKit; tagged with the hash of the task's folder). Starting a container is
one request, and all containers share one network in which they cannot reach each other.

Contract: a compose file with any key that is not translated here makes Compose start the task, so no setting is ever
ignored. Other unknown commands also go to Compose, which finds the container by its labels.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from aiodocker import Docker
from aiodocker.exceptions import DockerError
from harbor.environments.base import ExecResult

from harbortrainer.harbor_compat.compose_override import ComposeCall, ComposeOverrideDocker
from harbortrainer.sandbox.compose_files import MAIN
from harbortrainer.sandbox.containers import container_exit, daemon_client, shell
from harbortrainer.sandbox.containers.direct_container import DirectContainer, compose_labels
from harbortrainer.sandbox.containers.shell import ServiceCommand

COMMAND = ["sh", "-c", "sleep infinity"]
"""Command of the main service in Harbor's compose files."""
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_MOUNT_KEYS = {"type", "source", "target", "read_only"}


class UnsupportedComposeError(Exception):
    """A compose file has a setting that is not translated."""


def main_service(files: Sequence[Path]) -> dict:
    """Return the main service, merged from JSON compose files: later values win, tables are merged.

    Raises:
        UnsupportedComposeError: A file is not JSON, uses variables, or has more than the main service.
    """
    merged: dict = {}
    for path in files:
        text = path.read_text()
        if path.suffix != ".json" or "$" in text:
            raise UnsupportedComposeError(f"{path.name} is not JSON or uses variables")
        content = json.loads(text)
        if set(content) != {"services"} or set(content["services"]) != {"main"}:
            raise UnsupportedComposeError(f"{path.name} has more than services.main")
        for key, value in content["services"]["main"].items():
            before = merged.get(key)
            merged[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def container_config(service: dict) -> dict:
    """Return the body for the daemon's `containers/create`, without image and network.

    Raises:
        UnsupportedComposeError: The service has a setting that is not translated.
    """
    host: dict = {}
    config: dict = {"Cmd": COMMAND, "HostConfig": host}
    for key, value in service.items():
        match key, value:
            case ("build" | "image", _):
                continue  # the image is already built or pulled
            case "environment", dict():
                config["Env"] = [f"{name}={text}" for name, text in value.items()]
            case "labels", dict():
                config["Labels"] = value
            case "stop_grace_period", "0s":
                config["StopTimeout"] = 0
            case "volumes", list():
                host["Mounts"] = [_mount(volume) for volume in value if "bind" not in volume]
                host["Binds"] = [_bind_with_label(volume) for volume in value if "bind" in volume]
            case "init", bool():
                host["Init"] = value
            case "extra_hosts", list():
                host["ExtraHosts"] = value
            case "cpus", int() | float():
                host["NanoCpus"] = int(value * 1e9)
            case "pids_limit", int():
                host["PidsLimit"] = value
            case "mem_limit", str():
                host["Memory"] = _bytes(value)
            case _:
                raise UnsupportedComposeError(f"{key}: {value}")
    return config


def _mount(volume: dict) -> dict:
    source, target = str(volume.get("source")), str(volume.get("target"))
    if set(volume) - _MOUNT_KEYS or volume.get("type") != "bind" or not Path(source).is_absolute():
        raise UnsupportedComposeError(f"volumes: {volume}")
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": bool(volume.get("read_only"))}


def _bind_with_label(volume: dict) -> str:
    """Return a mount with an SELinux label, which the daemon takes only in its short form, as Harbor 0.25 mounts."""
    bind, mount = volume["bind"], _mount({key: value for key, value in volume.items() if key != "bind"})
    if set(bind) != {"selinux"} or ":" in mount["Source"] + mount["Target"]:
        raise UnsupportedComposeError(f"volumes: {volume}")
    return f"{mount['Source']}:{mount['Target']}:{'ro' if mount['ReadOnly'] else 'rw'},{bind['selinux']}"


def _bytes(text: str) -> int:
    number, unit = text[:-1], text[-1:].lower()
    if unit not in _UNITS or not number.isdecimal():
        raise UnsupportedComposeError(f"mem_limit: {text}")
    return int(number) * _UNITS[unit]


_SUCCESS = ExecResult(return_code=0)
_NOT_FOUND = 404
_built_images: set[str] = set()  # images that this process has built or found unchanged


class DirectDocker:
    """Runs the Compose commands of one environment through the daemon's API."""

    def __init__(self, environment: ComposeOverrideDocker) -> None:
        self._environment = environment
        self._client: Docker | None = None
        self._facts: daemon_client.DaemonFacts
        self._container: DirectContainer | None = None

    async def run(self, call: ComposeCall) -> ExecResult | None:
        """Run a Compose command; None leaves it to Compose."""
        match call.words:
            case ["build"]:
                return await self._build()
            case ["up", *_]:
                return await self._start()
        if self._container is None:
            return await self._remove_stale() if call.words == ["down", "--remove-orphans"] else None
        match call.words:
            case ["exec", *_]:
                return await self._exec(self._container, call)
            case ["cp", *_]:
                return await self._upload(self._container, call)
            case ["down", *options]:
                await self._container.kill_and_remove(volumes="--volumes" in options)
                self._container = None
                return _SUCCESS
        return None

    @property
    def container(self) -> DirectContainer | None:
        """The container; None if it was not started here."""
        return self._container

    async def close_shells(self) -> None:
        """Close the container's idle shells, which earlier processes may have tampered with."""
        if self._container is not None:
            await self._container.close_shells()

    async def close(self) -> None:
        """Close the client after the environment has stopped. Harbor may keep the container on request."""
        await self.close_shells()
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _build(self) -> ExecResult | None:
        if self._container_config() is None:
            return None
        image = self._environment.image
        if image not in _built_images:  # Harbor holds the task's lock
            await self._environment.compose("build")
            _built_images.add(image)
        return _SUCCESS

    async def _remove_stale(self) -> ExecResult | None:
        """Remove a container of the same trial from an earlier run, before the start."""
        if self._container_config() is None or not await self._connect():
            return None
        assert self._client is not None
        await container_exit.wait_removed(self._name)
        await DirectContainer(self._client, self._client.containers.container(self._name)).remove()
        return _SUCCESS

    async def _start(self) -> ExecResult | None:
        config = self._container_config()
        if config is None or not await self._connect():
            return None
        assert self._client is not None
        try:
            self._container = await self._create_container(self._client, config)
        except DockerError as error:
            return ExecResult(stdout=error.message, return_code=1)
        return _SUCCESS

    async def _create_container(self, client: Docker, config: dict) -> DirectContainer:
        try:
            return await DirectContainer.start(client, self._name, self._with_network(config))
        except DockerError as error:
            if error.status != _NOT_FOUND:
                raise
        # The image is missing, or it or the network was removed meanwhile.
        await self._environment.compose("build" if self._environment.builds_image else "pull")
        self._facts = await daemon_client.refresh_facts(client)
        return await DirectContainer.start(client, self._name, self._with_network(config))

    def _with_network(self, config: dict) -> dict:
        """Add the network. Without one the daemon would use its default, in which containers reach each other."""
        if self._facts.network is None:
            reason = f"Docker cannot create a network {daemon_client.NETWORK} that isolates containers from each other"
            raise DockerError(_NOT_FOUND, reason)
        return config | {"HostConfig": config["HostConfig"] | {"NetworkMode": self._facts.network}}

    async def _connect(self) -> bool:
        if self._client is None and (opened := await daemon_client.open_client()) is not None:
            self._client, self._facts = opened
            self._environment.set_rootless(self._facts.rootless)
        return self._client is not None and self._facts.network is not None

    def _container_config(self) -> dict | None:
        """Return the container's configuration; None if the task needs Compose."""
        files = self._environment.generated_compose_files()
        if files is None:
            return None
        try:
            config = container_config(main_service(files))
        except UnsupportedComposeError as reason:
            self._environment.logger.debug("using Compose: %s", reason)
            return None
        labels = config.get("Labels", {}) | compose_labels(self._environment.project)
        return config | {"Image": self._environment.image, "Labels": labels}

    @property
    def _name(self) -> str:
        return f"{self._environment.project}-{MAIN}-1"

    async def _exec(self, container: DirectContainer, call: ComposeCall) -> ExecResult | None:
        command = shell.parse_exec(call.words)
        if command is None or call.stdin is not None:
            return None
        try:
            return await container.run(command, call.seconds, call.on_output)
        except TimeoutError as error:
            raise RuntimeError(f"Command timed out after {call.seconds} seconds") from error

    async def _upload(self, container: DirectContainer, call: ComposeCall) -> ExecResult | None:
        """Upload a folder's content or a file as `docker cp` does; a missing target folder is created."""
        upload = shell.parse_upload(call.words)
        if upload is None:
            return None
        source, target = Path(upload[0]), upload[1]
        if upload[0].endswith("/."):
            result = await self._run_as_root(container, f"mkdir -p -- {shlex.quote(target)}")
            return result if result.return_code else await container.upload(target, source, None)
        folder, _, name = target.rpartition("/")
        into = shlex.quote(target)
        is_folder = (await self._run_as_root(container, f"test -d {into}")).return_code == 0
        folder, name = (target, source.name) if is_folder or not name else (folder or "/", name)
        result = await self._run_as_root(container, f"mkdir -p -- {shlex.quote(folder)}")
        return result if result.return_code else await container.upload(folder, source, name)

    async def _run_as_root(self, container: DirectContainer, text: str) -> ExecResult:
        return await container.run(ServiceCommand(["sh", "-c", text], user="0"), None, None)
