"""Task folders that others packed or wrote: unpacked, and looked at, before anything else touches them.

Invariant: nothing is written outside the folder it belongs to, no link in it leads out, nothing in it is a device, and
a task takes no more than `MAX_BYTES` and `MAX_FILES`: an archive of a few kilobytes can hold any amount of zeros.
"""

import errno
import gzip
import io
import os
import stat
import tarfile
import zlib
from pathlib import Path
from typing import override

from harbortrainer.errors import UserError
from harbortrainer.tasks.task_folder import TASK_FILE

MAX_BYTES = 4 << 30
MAX_FILES = 100_000
HEADER, AT_ONCE = 1024, 1 << 20
"""What a tar archive takes for each entry beside its content; most bytes of one read."""


class BoundedReader(io.RawIOBase):
    """A stream of which no more than `limit` bytes can be had, and no more than `AT_ONCE` with one call: tarfile reads
    a header's own data, whatever length it claims, with one."""

    def __init__(self, stream: io.BytesIO | gzip.GzipFile, limit: int) -> None:
        self._stream, self._limit = stream, limit

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._stream.tell()

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._need(offset)
        return self._stream.seek(offset, whence)

    @override
    def read(self, size: int = -1) -> bytes:
        self._need(self.tell() + size if 0 <= size <= AT_ONCE else self._limit + 1)
        return self._stream.read(size)

    def _need(self, end: int) -> None:
        if end > self._limit:
            raise tarfile.ReadError("it unpacks to more than a task may take")


def unpack_task(packed: bytes, folder: Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
    """Unpack a tar archive, gzipped or plain, of a task's folder.

    Args:
        packed: The archive.
        folder: An empty folder.
        max_bytes: Most bytes that it may unpack to.
        max_files: Most entries that it may have.

    Raises:
        UserError: It is broken, too large, or names a place outside of `folder`; part of it may lie there then.
    """
    raw = io.BytesIO(packed)
    stream = gzip.GzipFile(fileobj=raw) if packed[:2] == b"\x1f\x8b" else raw
    bounded = BoundedReader(stream, max_bytes + HEADER * max_files)
    try:
        with tarfile.open(fileobj=bounded, mode="r:") as tar:
            for number, member in enumerate(tar):
                if number >= max_files:
                    raise tarfile.ReadError(f"it has more than {max_files} entries")
                tar.extract(member, folder, filter="data")
            while bounded.read(AT_ONCE):  # gzip's checksum stands at its end
                pass
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise UserError(f"no archive of a task: {error}", do="have it packed again, or leave it out") from error
    inspect_tree(folder, max_bytes=max_bytes, max_files=max_files)


def inspect_tree(root: Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
    """Refuse a folder of others' with links that lead out, devices, pipes, or too much in it.

    Raises:
        UserError: Names the first.
    """
    home, size, count = os.path.realpath(root), 0, 0
    for parent, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(parent, name)
            found = path.lstat()
            count, size = count + 1, size + (found.st_size if stat.S_ISREG(found.st_mode) else 0)
            if count > max_files or size > max_bytes:
                what = f"more than {max_files} files or {max_bytes >> 20} MB"
                raise UserError(what, where=str(root), do="leave it out")
            _refuse_way_out(path, home, found.st_mode)


def drop_links_above_tasks(root: Path) -> None:
    """Remove the links that lie beside tasks, not in them: whoever looks for tasks would follow them anywhere."""
    for parent, folders, files in os.walk(root):
        if TASK_FILE in files:
            folders.clear()
            continue
        for name in (*folders, *files):
            if Path(parent, name).is_symlink():
                Path(parent, name).unlink()


def _refuse_way_out(path: Path, home: str, mode: int) -> None:
    if stat.S_ISLNK(mode):
        target = path.readlink()
        inside = os.path.realpath(path).startswith(home + os.sep)
        if target.is_absolute() or not inside:
            raise UserError(f"the link {path.name} leads out of the task", where=str(path), do="leave that task out")
    elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError("is a device or a pipe", where=str(path), do="leave that task out")
