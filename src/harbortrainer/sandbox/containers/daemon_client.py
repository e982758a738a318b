"""The Docker daemon's own API, by aiodocker: the daemon that the docker command would ask, too.

Invariant: a client belongs to one event loop, and who opened it closes it.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aiodocker import Docker
from aiodocker.exceptions import DockerError

NETWORK = "harbortrainer-apart"
"""The network of all containers that need none of their own: no two of them reach each other. It stays."""
_APART = ("com.docker.network.bridge.enable_icc", "false")


@dataclass(frozen=True)
class DaemonFacts:
    """What is asked once in a process, and again where a container cannot be started."""

    api_version: str
    rootless: bool
    network: str | None
    """The id of `NETWORK`; None where containers in it would reach each other."""
    data_root: Path | None = None
    """Where the daemon keeps what containers write; None where that is no folder of this machine."""


_known: dict[str, DaemonFacts] = {}


async def open_client() -> tuple[Docker, DaemonFacts] | None:
    """A client, which has the network at first; None where only the docker command knows the way, or nobody answers."""
    try:
        client = Docker()
    except (AssertionError, ValueError, ImportError, OSError, DockerError):
        return None
    try:
        known = _known.get(_address(client)) or await _ask(client)
    except DockerError:
        await client.close()
        return None
    except BaseException:
        await client.close()
        raise
    _known[_address(client)] = known
    client.api_version = known.api_version
    return client, known


async def data_root() -> Path | None:
    """Where the daemon keeps what containers write; None where nobody answers, or it is not this machine's."""
    opened = await open_client()
    if opened is None:
        return None
    client, known = opened
    await client.close()
    return known.data_root


def _address(client: Docker) -> str:
    """The daemon's: to aiodocker every socket of this machine is one host."""
    return str(getattr(client.connector, "path", client.docker_host))


async def ask_again(client: Docker) -> DaemonFacts:
    """What is true now: somebody may have removed the network."""
    _known[_address(client)] = known = await _ask(client)
    return known


async def _ask(client: Docker) -> DaemonFacts:
    version, info = await client.version(), await client.system.info()
    rootless = any("rootless" in option for option in info.get("SecurityOptions") or [])
    data_root = _folder_here(info.get("DockerRootDir", "")) if client.docker_host.startswith("unix://") else None
    return DaemonFacts(f"v{version['ApiVersion']}", rootless, await network_of(client), data_root)


def _folder_here(path: str) -> Path | None:
    return Path(path) if path and Path(path).is_dir() else None


async def network_of(client: Docker) -> str | None:
    """The id of the network, which is made if need be. None where containers cannot be kept apart in it.

    Two processes that make it at once get two of one name. All take the older one, by its id, since a daemon refuses
    a name that two networks have; the other goes as soon as it is empty.
    """
    found = await _networks(client)
    if not found:
        with suppress(DockerError):  # another process was faster, or it cannot be made, and then is not there
            await client.networks.create(
                {"Name": NETWORK, "CheckDuplicate": True, "Driver": "bridge", "Options": dict([_APART])}
            )
        found = await _networks(client)
    for late in found[1:]:
        with suppress(DockerError):  # in use
            await (await client.networks.get(late["Id"])).delete()
    if not found or (found[0].get("Options") or {}).get(_APART[0]) != _APART[1]:
        return None
    return found[0]["Id"]


async def _networks(client: Docker) -> list[dict]:
    """All of that name, the oldest first."""
    found = await client.networks.list(filters={"name": [f"^{NETWORK}$"]})
    return sorted(found, key=lambda network: (network["Created"], network["Id"]))
