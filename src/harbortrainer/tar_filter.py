"""Filter and reader for tar archives of strangers.

The filter: nothing is written, linked or changed outside the target folder. The reader: an archive of a few kilobytes
that would unpack to any size is refused.

The filters of Python before 3.12.11 and 3.13.4 let crafted archives write to any file (CVE-2025-4517, CVE-2025-4330,
CVE-2025-4138). The rules here do not depend on how a path resolves:

- no member lies behind a link, or takes the place of one;
- a hard link leads to a file that is already there; one to a symbolic link becomes a symbolic link;
- names are so short that every path can be resolved;
- targets of symbolic links are normalized, so that a later link cannot change where they lead.
"""

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import override

MAX_NAME = 1024
"""Most characters of a member's name, or of its link's target."""
HEADER, AT_ONCE = 1024, 1 << 20
"""Bytes of a tar header, allowed for each entry; most bytes of one read."""


class UnsafeMemberError(tarfile.FilterError):
    """A member of an archive that could lead out of the target folder."""


def strict_filter(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo:
    """Return a member as `tarfile.data_filter` does; call it directly before the member is extracted.

    Args:
        member: The member.
        target: The folder to which the archive is extracted.

    Raises:
        tarfile.FilterError: The member is not safe.
    """
    checked = check_path(tarfile.data_filter(member, target), target)
    return tarfile.data_filter(checked, target) if checked.issym() else checked


def check_path(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo:
    """Check the paths of a member that has passed a filter of `tarfile`. Args, result and errors: `strict_filter`."""
    if max(len(member.name), len(member.linkname)) > MAX_NAME:
        raise UnsafeMemberError("a path in it is too long")
    path = _path_without_links(member.name, target)
    if path.is_symlink() and not member.issym():
        raise UnsafeMemberError(f"{member.name!r} takes the place of a link")
    if member.islnk():
        linked = _path_without_links(member.linkname, target)
        if linked.is_symlink():  # as `cp -al` makes them
            member = member.replace(linkname=str(linked.readlink()), deep=False)
            member.type = tarfile.SYMTYPE
        elif not linked.is_file() or linked == path:
            raise UnsafeMemberError(f"{member.name!r} is a hard link to something other than an earlier file")
    if member.issym():
        return member.replace(linkname=os.path.normpath(member.linkname), deep=False)
    return member


def _path_without_links(name: str, target: str) -> Path:
    """Return the path of a member; no folder on the way there is a link."""
    path = Path(target)
    *folders, last = Path(name.lstrip("/")).parts or (".",)
    for folder in folders:
        path /= folder
        if folder == ".." or path.is_symlink():
            raise UnsafeMemberError(f"{name!r} lies behind a link or above the folder")
    return path / last


def use_for_all_archives() -> None:
    """Make this process's filter "data" strict. Harbor extracts archives from sandboxes and registries with it."""
    tarfile._NAMED_FILTERS["data"] = strict_filter  # ty: ignore[missing-attribute]


class BoundedReader(io.RawIOBase):
    """A stream of at most `limit` bytes, and at most `AT_ONCE` bytes per read.

    tarfile reads the data of a header in one call, whatever length the header claims.
    """

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
            raise tarfile.ReadError("its unpacked size exceeds the limit")
