"""Copies of a container's files on this machine, as `docker cp` makes them but bounded, and without devices.

`docker cp` writes a sparse terabyte as zeros, and a device as a device. Here the daemon's archive is read as it comes,
and refused at the header of the first file that is too large, before its content is sent.
"""

import asyncio
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from harbortrainer.tar_filter import UnsafeMemberError, check_path

DEFAULT_MB = 10_240
"""Limit of a download from a container of a task without `storage_mb`."""


class TooLargeError(RuntimeError):
    """A container's files exceed the limit of a download."""


def limit_bytes(storage_mb: int | None, target: Path) -> int:
    """Return the limit of a download: what the task may store, and at most half of the free disk of this machine."""
    existing = next(folder for folder in (target, *target.parents) if folder.is_dir())
    return min((storage_mb or DEFAULT_MB) << 20, shutil.disk_usage(existing).free // 2)


async def download(command: Sequence[str], env: Mapping[str, str] | None, target: Path, name: str, limit: int) -> None:
    """Unpack the archive that `docker cp` writes to its standard output.

    Args:
        command: The command, with `-` as its target.
        env: Its environment; None for this process's.
        target: The folder to unpack to, which exists.
        name: Name for a single file; "" for a folder's content.
        limit: Most bytes of all files.

    Raises:
        RuntimeError: The command failed, or the files exceed the limit. What was unpacked is removed.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as archive:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=writing, stderr=asyncio.subprocess.PIPE
            )
        finally:
            os.close(writing)
        unpacking = asyncio.create_task(asyncio.to_thread(_unpack, archive, target, name, limit))
        try:
            await asyncio.wait([unpacking])
        finally:  # also if cancelled: without the command, unpacking ends
            with suppress(ProcessLookupError):
                process.kill()
            _, errors = await process.communicate()
            await asyncio.wait([unpacking])
        try:
            unpacking.result()
        except tarfile.TarError as error:
            reason = errors.decode(errors="replace").strip()[-500:] or error
            raise RuntimeError(f"{' '.join(command)}: {reason}") from error


def _unpack(archive: BinaryIO, target: Path, name: str, limit: int) -> None:
    done: set[str] = set()
    try:
        with tarfile.open(fileobj=archive, mode="r|") as tar:
            tar.extractall(target, _members(tar, name, limit, done), filter=_keep)
    except BaseException:
        for entry in done:
            remove(target / entry)
        raise


def remove(path: Path) -> None:
    """Remove a folder or any other entry, which may be missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _members(tar: tarfile.TarFile, name: str, limit: int, done: set[str]) -> Iterator[tarfile.TarInfo]:
    """Yield the members and note their names in the target folder."""
    for member in tar:
        limit -= member.size if member.isreg() else 0
        if limit < 0:
            raise TooLargeError(f"{member.name!r} exceeds the limit of a download")
        if name:
            if not member.isreg():
                raise UnsafeMemberError(f"{member.name!r} is not a regular file")
            member.name = name
        done.update(PurePosixPath(member.name.lstrip("/")).parts[:1])
        yield member


def _keep(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo | None:
    """Keep modes and links as they are, since a verifier's container may get them; leave devices and pipes out."""
    if member.isdev():
        return None
    tarfile.tar_filter(member, target)
    return check_path(member.replace(uid=os.getuid(), gid=os.getgid(), uname="", gname="", deep=False), target)
