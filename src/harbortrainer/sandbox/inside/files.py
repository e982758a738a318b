"""Files in and out of a sandbox, carried out in a process of its own inside it: a tar archive on a standard stream.

It runs with the rights of the command's user and in the sandbox's own root, so whatever links the agent has planted
lead nowhere but into the sandbox.
"""

import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from typing import BinaryIO


def unpack(folder: str) -> int:
    """Unpack the archive on standard input into a folder, which is made. What is there already is replaced."""
    os.makedirs(folder, exist_ok=True)
    with os.fdopen(0, "rb") as source, tarfile.open(fileobj=source, mode="r|") as tar:
        for member in tar:
            path = os.path.join(folder, member.name)
            if os.path.lexists(path) and (os.path.islink(path) or not (member.isdir() and os.path.isdir(path))):
                os.unlink(path)
            tar.extract(member, folder, numeric_owner=True, filter="fully_trusted")
    return 0


def pack(folder: str, limit: str) -> int:
    """Write an archive of a folder's content to standard output: folders, files, links, and nothing else.

    Args:
        limit: Bytes, for the sizes that files claim; what goes beyond is left out and named on standard error.
    """
    left = int(limit)
    with os.fdopen(1, "wb") as sink, tarfile.open(fileobj=sink, mode="w|") as tar:
        for path, name in _walk(folder, ""):
            try:
                left -= _add(tar, path, name, left)
            except (OSError, ValueError) as error:
                os.write(2, f"left out: {name}: {error}\n".encode())
    return 0


def _add(tar: tarfile.TarFile, path: str, name: str, most: int) -> int:
    """Add one entry. Returns its size; raises before anything is written when it cannot be added."""
    member = tar.gettarinfo(path, name)
    if member is None or member.isdev():
        raise ValueError("neither file nor folder nor link")
    if member.size > most:
        raise ValueError("too large")
    if not member.isreg():
        tar.addfile(member)
        return 0
    with open(path, "rb") as file:
        tar.addfile(member, _Exactly(file, member.size))
    return member.size


def send(path: str, limit: str) -> int:
    """Write one regular file to standard output."""
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode) or info.st_size > int(limit):
        os.write(2, f"{path}: not a regular file, or too large\n".encode())
        return 1
    with open(path, "rb") as file:
        while os.sendfile(1, file.fileno(), None, 1 << 20):
            pass
    return 0


CALLS: dict[str, Callable[..., int]] = {"unpack": unpack, "pack": pack, "send": send}


def _walk(folder: str, prefix: str) -> Iterator[tuple[str, str]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda item: item.name):
            yield entry.path, prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{prefix}{entry.name}/")


class _Exactly(io.RawIOBase):
    """A file that has the length it had when we looked, whatever is written to it meanwhile."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def read(self, count: int = -1, /) -> bytes:
        wanted = self._left if count < 0 else min(count, self._left)
        self._left -= wanted
        return self._file.read(wanted).ljust(wanted, b"\0")
