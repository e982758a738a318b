"""How near a container is to its own limits.

Harbor's containers have the task's limit of memory. Of processes they had none, so that a fork bomb took the machine's;
ours have one, unless the task's compose files say another.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import aiohttp
from aiodocker import Docker
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError

from harbortrainer.sandbox.containers import daemon_client
from harbortrainer.sandbox.containers.container_usage import ContainerUsage

PIDS = 2048
"""Processes and threads of a container whose task says nothing: podman's own default."""
_ASK_S = 20.0


def say_processes(files: Sequence[Path]) -> bool:
    """Whether compose files say themselves how many processes there may be (`pids_limit`, or `pids` of `deploy`)."""
    return any("pids" in path.read_text(errors="replace") for path in files)


async def used_up(label: str) -> str:
    """Which limit the labelled container has all but reached, in words; "" for none, and where nobody tells."""
    opened = await daemon_client.open_client()
    if opened is None:
        return ""
    client, _ = opened
    try:
        with suppress(DockerError, aiohttp.ClientError, TimeoutError):
            for container in await client.containers.list(filters=json.dumps({"label": [label]})):
                return (await _usage(client, container)).shortage
        return ""  # it is gone, or the daemon is: what follows will say so
    finally:
        await client.close()


async def _usage(client: Docker, container: DockerContainer) -> ContainerUsage:
    details = await container.show()
    found = ContainerUsage.of_kernel(details["State"]["Pid"], details["Id"])
    return found or ContainerUsage.of_daemon(await _stats(client, container))


async def _stats(client: Docker, container: DockerContainer) -> dict:
    """One look. aiodocker's own asks for two, a second apart."""
    place = f"{client.docker_host}/{client.api_version}/containers/{container.id}/stats"
    asked, patience = {"stream": "false", "one-shot": "true"}, aiohttp.ClientTimeout(_ASK_S)
    async with client.session.get(place, params=asked, timeout=patience) as answer:
        return await answer.json() if answer.status == HTTPStatus.OK else {}
