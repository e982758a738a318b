"""Downloads of folders as an archive that the sandbox's own `tar` makes: artifacts with `exclude`.

The agent can replace that `tar`, so the archive is a stranger's. Harbor unpacks it in the event loop, to any size.
"""

import asyncio
import gzip
import shlex
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import override
from uuid import uuid4

from harbor.environments.base import BaseEnvironment

from harbortrainer.sandbox.containers.downloads import TooLargeError, limit_bytes, remove
from harbortrainer.tar_filter import HEADER, BoundedReader, strict_filter

MAX_FILES = 100_000
_TAR_S = 600


class TarDownloads(BaseEnvironment):
    """An environment that bounds the unpacked size of such an archive."""

    @override
    async def download_dir_with_exclusions(
        self, *, source_dir: str, target_dir: Path | str, exclude: Sequence[str]
    ) -> None:
        await self.service_download_dir_with_exclusions(source_dir=source_dir, target_dir=target_dir, exclude=exclude)

    @override
    async def service_download_dir_with_exclusions(
        self, *, source_dir: str, target_dir: Path | str, exclude: Sequence[str], service: str | None = None
    ) -> None:
        """Download a folder without the files that match `exclude`, as patterns of tar.

        Raises:
            RuntimeError: tar failed, or the files exceed the task's `storage_mb` or half of the free disk.
            tarfile.TarError: The archive is broken, or a member leads out of the folder.
        """
        packed, target = f"/tmp/.download-{uuid4()}.tar.gz", Path(target_dir)
        flags = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in exclude)
        pack = f"tar czf {packed} {flags} -C {shlex.quote(source_dir)} ."
        done = await self.service_exec(pack, service=service, timeout_sec=_TAR_S, user="root")
        if done.return_code != 0:
            raise RuntimeError(f"tar ended with code {done.return_code}: {done.stderr or done.stdout or 'no output'}")
        limit = limit_bytes(self.task_env_config.storage_mb, target)
        with TemporaryDirectory() as folder:
            archive = Path(folder) / "archive.tar.gz"
            await self.service_download_file(source_path=packed, target_path=archive, service=service)
            await asyncio.to_thread(unpack_bounded, archive, target, limit)
        await self.service_exec(f"rm -f {packed}", service=service, timeout_sec=_TAR_S, user="root")


def unpack_bounded(archive: Path, target: Path, limit: int) -> None:
    """Unpack a gzipped tar archive of a stranger.

    Args:
        archive: The archive.
        target: The folder to unpack to.
        limit: Most bytes of all files, with the holes of sparse ones.

    Raises:
        RuntimeError: The files exceed the limit. What was unpacked is removed.
        tarfile.TarError: The archive is broken, or a member leads out of the folder. The same.
    """
    done: set[str] = set()
    target.mkdir(parents=True, exist_ok=True)
    with gzip.open(archive) as stream:
        bounded = BoundedReader(stream, limit + HEADER * MAX_FILES)
        try:
            with tarfile.open(fileobj=bounded, mode="r:") as tar:
                tar.extractall(target, _members(tar, limit, done), filter=_keep)
        except BaseException:
            for entry in done:
                remove(target / entry)
            raise


def _members(tar: tarfile.TarFile, limit: int, done: set[str]) -> Iterator[tarfile.TarInfo]:
    for number, member in enumerate(tar):
        limit -= member.size
        if limit < 0 or number >= MAX_FILES:
            raise TooLargeError(f"{member.name!r} exceeds the limit of a download")
        done.update(PurePosixPath(member.name.lstrip("/")).parts[:1])
        yield member


def _keep(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo | None:
    return None if member.isdev() else strict_filter(member, target)
