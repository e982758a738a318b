"""What a container has written to its daemon's disk: its own layer, its volumes, and files without a name."""

import asyncio
import json
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from harbortrainer.sandbox.containers.container_disks import BLOCK, size_of
from harbortrainer.sandbox.docker_examination import containers, docker

_COUNT_S = 60.0


async def written_in(label: str) -> int:
    """Bytes, of the labelled container; what cannot be seen (not by root, not in time) is left out."""
    for container in await containers(label):
        said = await docker("inspect", "--size", container, seconds=_COUNT_S)
        if said.code == 0:
            (details,) = json.loads(said.out)
            return details.get("SizeRw", 0) + await asyncio.to_thread(_beside_the_layer, details)
    return 0


async def remove(label: str) -> None:
    """Remove the labelled container and what it has written."""
    for container in await containers(label):
        await docker("rm", "--force", "--volumes", container, seconds=_COUNT_S)


def _beside_the_layer(details: dict) -> int:
    volumes = [Path(mount["Source"]) for mount in details["Mounts"] if mount["Type"] == "volume"]
    return sum(map(size_of, volumes)) + sum(_without_name(details["State"]["Pid"]).values())


def _without_name(first: int) -> dict[int, int]:
    """The files on its root that were removed and are held open by its processes: bytes by inode."""
    found: dict[int, int] = {}
    with suppress(OSError):
        namespace, root = Path(f"/proc/{first}/ns/pid").readlink(), Path(f"/proc/{first}/root").stat().st_dev
        for file in _open_files(namespace):
            with suppress(OSError):  # it ends
                seen = file.stat()
                if stat.S_ISREG(seen.st_mode) and not seen.st_nlink and seen.st_dev == root:
                    found[seen.st_ino] = seen.st_blocks * BLOCK
    return found


def _open_files(namespace: Path) -> Iterator[Path]:
    """Of all processes in a namespace."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "ns/pid").readlink() == namespace:
                yield from (process / "fd").iterdir()
