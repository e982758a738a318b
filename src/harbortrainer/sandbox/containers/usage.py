"""Processes and memory of a container, compared with its limits.

If the daemon is on this machine, the values come from the cgroup files; else from the daemon, which takes about a
second longer. No process runs inside the container, so the values cannot be forged.

Harbor's containers have the task's memory limit but no process limit, so a fork bomb would exhaust the host. Ours
have one, unless the task's compose files set another.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import aiohttp
from aiodocker import Docker
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError

from harbortrainer.sandbox.compose_files import read_text
from harbortrainer.sandbox.containers import daemon_client

_CACHES = ("inactive_file", "active_file")
_MEMORY_FILES = {"usage_in_bytes": "limit_in_bytes", "current": "max"}
"""Names of the usage and limit files in cgroups of version 1 and 2."""


@dataclass(frozen=True)
class ContainerUsage:
    """Process count and memory bytes (without reclaimable caches) with their limits; 0 means no limit."""

    processes: int
    process_limit: int
    memory: int
    memory_limit: int

    @property
    def shortage(self) -> str:
        """Describe the limit that is nearly reached (3/4 of the processes, 7/8 of the memory); "" for none."""
        if self.processes > self.process_limit * 3 // 4 > 0:
            return f"{self.processes} of {self.process_limit} processes ran"
        if self.memory > self.memory_limit * 7 // 8 > 0:
            return f"memory was at {self.memory >> 20} of {self.memory_limit >> 20} MB"
        return ""

    @classmethod
    def from_daemon(cls, stats: Mapping[str, Mapping]) -> "ContainerUsage":
        """Read the usage from the daemon's `stats` response."""
        processes, memory = stats.get("pids_stats", {}), stats.get("memory_stats", {})
        used = memory.get("usage", 0) - _cache_bytes(memory.get("stats", {}))
        return cls(processes.get("current", 0), processes.get("limit", 0), used, memory.get("limit", 0))

    @classmethod
    def from_kernel(cls, pid: int, container: str, root: Path = Path("/")) -> "ContainerUsage | None":
        """Read the usage from the container's cgroups; None if they are not readable on this machine.

        Args:
            pid: The container's init process as its daemon reports it. On another machine the id is meaningless.
            container: The container id, which is part of its cgroups' names.
            root: The folder that contains `proc` and `sys`.
        """
        try:
            groups = dict(_read_groups(root / f"proc/{pid}/cgroup", container))
            processes, memory = (_controller_folder(root, groups, name) for name in ("pids", "memory"))
            (used, limit), *_ = ((u, m) for u, m in _MEMORY_FILES.items() if (memory / f"memory.{u}").exists())
            details = dict(line.split() for line in (memory / "memory.stat").read_text().splitlines())
            return cls(
                _read_number(processes / "pids.current"),
                _read_number(processes / "pids.max"),
                _read_number(memory / f"memory.{used}")
                - _cache_bytes({name: int(text) for name, text in details.items()}),
                _read_number(memory / f"memory.{limit}"),
            )
        except (OSError, KeyError, ValueError):
            return None


def _read_groups(file: Path, container: str) -> Iterator[tuple[str, str]]:
    """Yield (controller, path) of the container's cgroup in each hierarchy; "" is version 2."""
    for line in file.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        before, found, after = path.partition(container)
        if found:  # the process may be in a child of the container's cgroup
            for name in controllers.split(","):
                yield name, before + found + after.partition("/")[0]


def _controller_folder(root: Path, groups: Mapping[str, str], controller: str) -> Path:
    own = f"{controller}{groups[controller]}" if controller in groups else groups[""].lstrip("/")
    return root / "sys/fs/cgroup" / own


def _read_number(file: Path) -> int:
    text = file.read_text().strip()
    return 0 if text == "max" else int(text)


def _cache_bytes(details: Mapping[str, int]) -> int:
    return sum(details.get(f"total_{name}", details.get(name, 0)) for name in _CACHES)


PIDS = 2048
"""Default limit of processes and threads in a container: podman's default."""
_ASK_S = 20.0


def process_limit(files: Sequence[Path], processes: int) -> dict[str, object]:
    """Return the keys of a Compose service that limit its processes; empty if the compose files set a limit.

    Compose refuses `pids_limit` beside limits under `deploy`, which need their own key.

    Args:
        files: The other compose files of the service.
        processes: Limit of processes and threads.
    """
    texts = [read_text(path) for path in files]
    if any("pids" in text for text in texts):
        return {}
    if any("deploy" in text for text in texts):
        return {"deploy": {"resources": {"limits": {"pids": processes}}}}
    return {"pids_limit": processes}


async def exhausted_limit(label: str) -> str:
    """Describe the limit that the labelled container has nearly reached; "" for none or without a daemon."""
    opened = await daemon_client.open_client()
    if opened is None:
        return ""
    client, _ = opened
    try:
        with suppress(DockerError, aiohttp.ClientError, TimeoutError):
            for container in await client.containers.list(filters=json.dumps({"label": [label]})):
                return (await _measure(client, container)).shortage
        return ""  # the container or the daemon is gone: the next command reports it
    finally:
        await client.close()


async def _measure(client: Docker, container: DockerContainer) -> ContainerUsage:
    details = await container.show()
    found = ContainerUsage.from_kernel(details["State"]["Pid"], details["Id"])
    return found or ContainerUsage.from_daemon(await _stats(client, container))


async def _stats(client: Docker, container: DockerContainer) -> dict:
    """Fetch one sample. aiodocker's own method takes two, a second apart."""
    url = f"{client.docker_host}/{client.api_version}/containers/{container.id}/stats"
    params, timeout = {"stream": "false", "one-shot": "true"}, aiohttp.ClientTimeout(_ASK_S)
    async with client.session.get(url, params=params, timeout=timeout) as response:
        return await response.json() if response.status == HTTPStatus.OK else {}
