"""Opening of files that an agent may have replaced: by a pipe, a device, a link, a lease or a terabyte of zeros.

Invariants: nothing here waits for another process, only a regular file is read, and no device is opened: some act when
they are opened, such as a watchdog.
"""

import errno
import os
import stat

from harbortrainer.sandbox.inside import syscalls as k

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_HANDLE = os.O_PATH | os.O_CLOEXEC  # opens nothing yet


def open_regular(path: str, *, follow: bool = False, folder: int | None = None) -> int:
    """Return a descriptor of a regular file, open for reading.

    Args:
        path: The file; relative to `folder` if that is given.
        follow: Follow a link in the last part of the path.
        folder: Descriptor of a folder.

    Raises:
        OSError: It is missing or no regular file, or a process holds a lease on it.
    """
    return _open(os.open(path, _HANDLE | (0 if follow else os.O_NOFOLLOW), dir_fd=folder), path)


def _open(handle: int, path: str) -> int:
    """Open the regular file of a handle for reading, and close the handle."""
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return os.open(f"/proc/self/fd/{handle}", _FLAGS)
    finally:
        os.close(handle)


def read_regular(path: str, most: int, *, follow: bool = False, folder: int | None = None) -> bytes:
    """Return the first `most` bytes of a regular file; errors as in `open_regular`."""
    return _read(open_regular(path, follow=follow, folder=folder), most)


def read_in_root(root: int, path: str, most: int) -> bytes:
    """Return the first `most` bytes of a regular file below the folder that is open as `root`; no link is followed."""
    return _read(_open(k.open_in_root(root, path, _HANDLE, follow=False), path), most)


def _read(fd: int, most: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read(most)
