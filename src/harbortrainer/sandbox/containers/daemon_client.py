"""Clients for the Docker daemon's API, through aiodocker: the same daemon that the docker command uses.

Invariant: a client belongs to one event loop, and its opener closes it.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aiodocker import Docker
from aiodocker.exceptions import DockerError

NETWORK = "harbortrainer-apart"
"""Shared network of all containers that need none of their own. They cannot reach each other. It is never removed."""
_ISOLATION_OPTION = ("com.docker.network.bridge.enable_icc", "false")


@dataclass(frozen=True)
class DaemonFacts:
    """Facts about a daemon, fetched once per process and again if a container cannot be started."""

    api_version: str
    rootless: bool
    network: str | None
    """The id of `NETWORK`; None if it does not isolate containers from each other."""
    data_root: Path | None = None
    """The daemon's data folder; None if it is not on this machine."""


_facts_by_address: dict[str, DaemonFacts] = {}


async def open_client() -> tuple[Docker, DaemonFacts] | None:
    """Open a client and fetch the daemon's facts; None if aiodocker cannot reach the daemon."""
    try:
        client = Docker()
    except (AssertionError, ValueError, ImportError, OSError, DockerError):
        return None
    try:
        facts = _facts_by_address.get(_address(client)) or await _fetch_facts(client)
    except DockerError:
        await client.close()
        return None
    except BaseException:
        await client.close()
        raise
    _facts_by_address[_address(client)] = facts
    client.api_version = facts.api_version
    return client, facts


async def data_root() -> Path | None:
    """Return the daemon's data folder; None if it does not answer or is on another machine."""
    opened = await open_client()
    if opened is None:
        return None
    client, facts = opened
    await client.close()
    return facts.data_root


def _address(client: Docker) -> str:
    """Return the daemon's address: its socket path, since aiodocker gives all local sockets the same host."""
    return str(getattr(client.connector, "path", client.docker_host))


async def refresh_facts(client: Docker) -> DaemonFacts:
    """Fetch the facts again: the network may have been removed."""
    _facts_by_address[_address(client)] = facts = await _fetch_facts(client)
    return facts


async def _fetch_facts(client: Docker) -> DaemonFacts:
    version, info = await client.version(), await client.system.info()
    rootless = any("rootless" in option for option in info.get("SecurityOptions") or [])
    data_root = _local_folder(info.get("DockerRootDir", "")) if client.docker_host.startswith("unix://") else None
    return DaemonFacts(f"v{version['ApiVersion']}", rootless, await ensure_network(client), data_root)


def _local_folder(path: str) -> Path | None:
    return Path(path) if path and Path(path).is_dir() else None


async def ensure_network(client: Docker) -> str | None:
    """Return the id of the network, created if missing. None if it does not isolate containers from each other.

    Two processes that create it at once get two networks of one name. All use the older one, by its id, because a
    daemon refuses an ambiguous name. The other is removed once it is unused.
    """
    networks = await _list_networks(client)
    if not networks:
        with suppress(DockerError):  # another process was faster, or it cannot be created: the next list shows it
            await client.networks.create(
                {"Name": NETWORK, "CheckDuplicate": True, "Driver": "bridge", "Options": dict([_ISOLATION_OPTION])}
            )
        networks = await _list_networks(client)
    for duplicate in networks[1:]:
        with suppress(DockerError):  # still in use
            await (await client.networks.get(duplicate["Id"])).delete()
    if not networks or (networks[0].get("Options") or {}).get(_ISOLATION_OPTION[0]) != _ISOLATION_OPTION[1]:
        return None
    return networks[0]["Id"]


async def _list_networks(client: Docker) -> list[dict]:
    """Return all networks of that name, oldest first."""
    networks = await client.networks.list(filters={"name": [f"^{NETWORK}$"]})
    return sorted(networks, key=lambda network: (network["Created"], network["Id"]))
