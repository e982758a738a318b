"""Log folders that Harbor mounts into a container from this machine, and reads here while the container runs.

A process in the container can put a link to a file of this machine, a pipe or a terabyte of zeros into such a folder.
Harbor and its agents would follow the link as this machine's user, or wait for ever. So the mounted folder is moved
aside before they read, and a copy of its regular files takes its place.

Invariant: while a folder is detached, no process in the container can change what its path holds.
"""

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from harbortrainer.sandbox.inside.regular_files import open_regular

_MAX_ENTRIES, _MAX_DEPTH = 20_000, 64
_MAX_BYTES, _CHUNK = 256 << 20, 1 << 20
_log = logging.getLogger(__name__)


class LogFolder:
    """One mounted folder. Its methods block: run them in a thread.

    Args:
        path: The folder, before the container is started.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._mounted = path, path.with_name(f".{path.name}-mounted")
        self._copied: list[str] = []

    def detach(self) -> None:
        """Put a copy of the mounted folder's regular files, at most 256 MB, in its place; no effect if repeated."""
        if self._mounted.is_dir():
            return
        self._path.rename(self._mounted)
        self._path.mkdir()
        self._copied = [entry.name for entry in self._mounted.iterdir()]
        if left := _copy_regular(self._mounted, self._path):
            _log.warning("%s: left out %d files that are not regular, unreadable or too large", self._path, left)

    def attach(self) -> None:
        """Put the mounted folder back. Its files are removed if the copies have been moved away."""
        if not self._mounted.is_dir():
            return
        if not any(self._path.iterdir()):
            for name in self._copied:
                _remove(self._mounted / name)
        shutil.rmtree(self._path)
        self._mounted.rename(self._path)

    def remove_mounted(self) -> None:
        """Remove the mounted folder after the container has ended."""
        shutil.rmtree(self._mounted, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _copy_regular(source: Path, target: Path) -> int:
    """Copy the regular files without following a link. Return the number of entries left out."""
    budget, entries, left_out = _MAX_BYTES, 0, 0
    for top, folders, names, fd in os.fwalk(source, follow_symlinks=False):
        place = target / Path(top).relative_to(source)
        if len(place.relative_to(target).parts) >= _MAX_DEPTH:
            folders.clear()
        for name in names:
            entries += 1
            if entries > _MAX_ENTRIES:
                return left_out + 1
            try:
                budget -= _copy_file(name, fd, place, budget)
            except (OSError, ValueError):
                left_out += 1
    return left_out


def _copy_file(name: str, folder: int, place: Path, budget: int) -> int:
    with os.fdopen(open_regular(name, folder=folder), "rb") as file:
        info = os.fstat(file.fileno())
        if info.st_size > budget:
            raise ValueError("too large")
        place.mkdir(parents=True, exist_ok=True)
        left = info.st_size
        with (place / name).open("xb") as copy:
            while left and (chunk := file.read(min(left, _CHUNK))):
                copy.write(chunk)
                left -= len(chunk)
        os.utime(place / name, ns=(info.st_atime_ns, info.st_mtime_ns))
    return info.st_size
