"""Disk usage of a container, and whether it filled a disk: the daemon's, or the one of its trial's folder.

Docker limits neither disk, and a full disk affects all trials of the machine, so the container is checked while it
runs. Its usage is its own layer, its volumes, deleted files that are still open, and its trial's folder.

Invariant: the agent is blamed only if a disk is full and its files there exceed the task's storage_mb, or half of the
space that was free before the start.
"""

import asyncio
import json
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from harbortrainer.sandbox.docker_examination import containers, docker

_FULL_B = 64 << 20
_CHECK_S, _RECHECK_S = 0.5, 10.0
_LARGE_B = 1 << 20
BLOCK_BYTES = 512
"""Bytes of a block in `st_blocks`."""


@dataclass(frozen=True)
class ContainerDisks:
    """Disks of one container and their free space before its start. Create it with `ContainerDisks.measure(...)`."""

    mounted: Path
    data_root: Path | None
    limit: int | None
    """Bytes that the container may write; None if the task sets no limit."""
    free: dict[Path, int]
    """Free bytes by folder."""

    @classmethod
    def measure(cls, mounted: Path, data_root: Path | None, storage_mb: int | None) -> "ContainerDisks":
        """Measure the free space now, before the container starts.

        Args:
            mounted: The trial's folder, which the container mounts.
            data_root: The daemon's data folder; None if it is not on this machine.
            storage_mb: The task's limit.
        """
        folders = [mounted, *([data_root] if data_root else [])]
        free = {folder: disk_usage(folder).free for folder in folders}
        return cls(mounted, data_root, storage_mb << 20 if storage_mb else None, free)

    async def wait(self) -> None:
        """Wait until the next check. Longer while a disk is full, since counting files is slow."""
        await asyncio.sleep(_RECHECK_S if await asyncio.to_thread(self._full_folders) else _CHECK_S)

    async def overuse(self, count_layer: Callable[[], Awaitable[int]]) -> str:
        """Describe how the container filled a disk; "" if no disk is full or the container is not the cause.

        Args:
            count_layer: Counts the bytes that the container wrote to the daemon's disk. Slow for many files.
        """
        full = await asyncio.to_thread(self._full_folders)
        if not full:
            return ""
        own = {self.mounted: await asyncio.to_thread(size_of, self.mounted)}
        if self.data_root is not None:
            own[self.data_root] = await count_layer()
            if self.data_root.stat().st_dev == self.mounted.stat().st_dev:
                own = dict.fromkeys(own, sum(own.values()))
        return next(filter(None, (self._describe(folder, own[folder]) for folder in full)), "")

    def _full_folders(self) -> list[Path]:
        return [folder for folder in self.free if disk_usage(folder).free < _FULL_B]

    def _describe(self, folder: Path, own: int) -> str:
        description = f"the disk is full: the container wrote {own >> 20} MB"
        if self.limit is not None and own > self.limit:
            return f"{description} of at most {self.limit >> 20} MB"
        return f"{description} of {self.free[folder] >> 20} MB that were free" if own > self.free[folder] // 2 else ""

    def truncate_files(self) -> None:
        """Truncate the files above 1 MB in the mounted folder if its disk is full."""
        if self.mounted not in self._full_folders():
            return
        for file in _iter_files(self.mounted):
            with suppress(OSError):  # owned by another user
                if _bytes(file) > _LARGE_B:
                    os.truncate(file.path, 0)


def size_of(folder: Path) -> int:
    """Return the bytes that the files in a folder occupy. Links are not followed; unreadable entries are skipped."""
    return sum(map(_bytes, _iter_files(folder)))


def _bytes(file: os.DirEntry) -> int:
    try:
        return file.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
    except OSError:
        return 0


def _iter_files(folder: Path) -> Iterator[os.DirEntry]:
    folders = [str(folder)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry


_COUNT_S = 60.0


async def written_bytes(label: str) -> int:
    """Return the bytes that the labelled container wrote to the daemon's disk. Unreadable parts are not counted."""
    for container in await containers(label):
        result = await docker("inspect", "--size", container, seconds=_COUNT_S)
        if result.code == 0:
            (details,) = json.loads(result.out)
            return details.get("SizeRw", 0) + await asyncio.to_thread(_bytes_outside_layer, details)
    return 0


async def remove(label: str) -> None:
    """Remove the labelled container with its volumes."""
    for container in await containers(label):
        await docker("rm", "--force", "--volumes", container, seconds=_COUNT_S)


def _bytes_outside_layer(details: dict) -> int:
    volumes = [Path(mount["Source"]) for mount in details["Mounts"] if mount["Type"] == "volume"]
    return sum(map(size_of, volumes)) + sum(_deleted_open_files(details["State"]["Pid"]).values())


def _deleted_open_files(init_pid: int) -> dict[int, int]:
    """Return bytes by inode of the deleted files on the container's root that its processes hold open."""
    found: dict[int, int] = {}
    with suppress(OSError):
        namespace, root = Path(f"/proc/{init_pid}/ns/pid").readlink(), Path(f"/proc/{init_pid}/root").stat().st_dev
        for file in _open_files(namespace):
            with suppress(OSError):  # the process ended
                info = file.stat()
                if stat.S_ISREG(info.st_mode) and not info.st_nlink and info.st_dev == root:
                    found[info.st_ino] = info.st_blocks * BLOCK_BYTES
    return found


def _open_files(namespace: Path) -> Iterator[Path]:
    """Yield the open files of all processes in a process namespace."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "ns/pid").readlink() == namespace:
                yield from (process / "fd").iterdir()
