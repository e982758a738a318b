"""Log folders that Harbor mounts into a container from this machine, and uses here while the container runs.

A process in the container can put a link to a file of this machine, a pipe or a terabyte of zeros into such a folder.
Harbor and its agents would follow the link as this machine's user, or wait for ever. So they get a copy:

- `AgentLogs`: the container mounts another folder from its start. Its regular files are copied to Harbor's folder after
  the agent has ended, and what the harness wrote there is copied into the container before grading.
- `Artifacts`: mounts another folder too. The daemon copies its files, since links and modes of artifacts count.
- `VerifierLogs`: the mounted folder is moved aside after a verifier's command, and a copy takes its place.

Invariant: no file that a process in the container can replace is opened by its path, except to read a regular file.
"""

import logging
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from harbor.models.trial.paths import TrialPaths

from harbortrainer.sandbox.containers.downloads import remove
from harbortrainer.sandbox.containers.shell import MAIN
from harbortrainer.sandbox.inside.regular_files import open_regular

_MAX_ENTRIES, _MAX_DEPTH = 20_000, 64
_MAX_BYTES, _CHUNK = 256 << 20, 1 << 20
_MAX_ARTIFACT_BYTES = 1 << 30
_log = logging.getLogger(__name__)


class MountedFolder:
    """A folder of Harbor's for which the container mounts another one. Its methods block: run them in a thread.

    Args:
        path: Harbor's folder.
        mounted: The folder to mount.
    """

    def __init__(self, path: Path, mounted: Path) -> None:
        self.path, self.mounted = path, mounted
        self._copied: set[str] | None = None
        self._is_mounted = False

    def mount(self, volumes: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Return the volumes with the folder to mount in place of Harbor's folder."""
        own, mounted = str(self.path.resolve()), str(self.mounted.absolute())
        self._is_mounted |= any(volume.get("source") == own for volume in volumes)
        return [{**volume, "source": mounted} if volume.get("source") == own else {**volume} for volume in volumes]

    def create(self) -> None:
        """Create the folder to mount, if one is, writable by the container's users."""
        if self._is_mounted:
            self.mounted.mkdir(parents=True, exist_ok=True)
            self.mounted.chmod(0o777)

    def begin(self) -> None:
        """Begin another agent. The last one's files are removed if Harbor has moved the copies away."""
        if self._copied is not None and not any(self.path.iterdir()):
            for name in self._copied:
                remove(self.mounted / name)
        self._copied = None

    def remove_mounted(self) -> None:
        """Remove the mounted folder after the container has ended."""
        shutil.rmtree(self.mounted, ignore_errors=True)


class AgentLogs(MountedFolder):
    """The agent's log folder.

    Args:
        path: Harbor's folder.
        session: Name of the container. A trial may have one for the agent and one for the verifier.
    """

    def __init__(self, path: Path, session: str) -> None:
        super().__init__(path, _mounted_folder(path, session))

    def collect(self) -> None:
        """Copy the container's regular files, at most 256 MB, beside what the harness wrote; once for each agent."""
        if self._copied is None and self.mounted.is_dir():
            written = {entry.name for entry in self.path.iterdir() if entry.is_file() and entry.stat().st_size}
            _copy_and_warn(self.mounted, self.path)
            self._copied = {entry.name for entry in self.path.iterdir()} - written

    def publish(self) -> None:
        """Copy what the harness wrote into the container: a verifier may read it."""
        if self.mounted.is_dir():
            with _opened(self.mounted) as target:
                for path in self.path.iterdir():
                    if path.is_file() and path.name not in (self._copied or ()):
                        _replace_file(path, target)


class Artifacts(MountedFolder):
    """The folder of published artifacts.

    Args:
        paths: Paths of the trial.
        session: As in `AgentLogs`.
    """

    FOLDER = "/logs/artifacts"
    """The folder in the container."""

    def __init__(self, paths: TrialPaths, session: str) -> None:
        # Not beside Harbor's folder, whose neighbours are moved away between the steps of a task.
        super().__init__(paths.host_artifact_path(MAIN, self.FOLDER), _mounted_folder(paths.artifacts_dir, session))

    def clear(self) -> bool:
        """Remove the last copies. Return whether there is anything to copy, and not more than 1 GB."""
        if not self.mounted.is_dir():
            return False
        if self._copied is not None and not any(self.path.iterdir()):
            self.begin()
        for entry in self.path.iterdir():
            remove(entry)
        if (size := _apparent_bytes(self.mounted)) > _MAX_ARTIFACT_BYTES:
            _log.warning("%s: not copied, since its files have %d bytes", self.FOLDER, size)
            return False
        return any(self.mounted.iterdir())

    def keep_names(self) -> None:
        """Note which entries were copied."""
        self._copied = {entry.name for entry in self.path.iterdir()}


class VerifierLogs:
    """The verifier's log folder. Its methods block: run them in a thread.

    Args:
        path: The folder, before the container is started.
        session: As in `AgentLogs`.
    """

    def __init__(self, path: Path, session: str) -> None:
        self._path, self._mounted = path, _mounted_folder(path, session)
        self._copied: list[str] = []

    def detach(self) -> None:
        """Put a copy of the mounted folder's regular files, at most 256 MB, in its place; no effect if repeated."""
        if self._mounted.is_dir() or not self._path.is_dir():
            return
        self._path.rename(self._mounted)
        self._path.mkdir()
        self._copied = [entry.name for entry in self._mounted.iterdir()]
        _copy_and_warn(self._mounted, self._path)

    def attach(self) -> None:
        """Put the mounted folder back. Its files are removed if the copies have been moved away."""
        if not self._mounted.is_dir():
            return
        if not any(self._path.iterdir()):
            for name in self._copied:
                remove(self._mounted / name)
        shutil.rmtree(self._path)
        self._mounted.rename(self._path)

    def remove_mounted(self) -> None:
        """Remove the mounted folder after the container has ended."""
        shutil.rmtree(self._mounted, ignore_errors=True)


def _apparent_bytes(folder: Path) -> int:
    """Return the sizes of a folder's files, with the holes of sparse ones."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed meanwhile
                total += (Path(top) / name).lstat().st_size
    return total


def _mounted_folder(path: Path, session: str) -> Path:
    return path.with_name(f".{path.name}-{session}")


@contextmanager
def _opened(folder: Path) -> Generator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _replace_file(path: Path, folder: int) -> None:
    """Write a copy of a file into an open folder, in place of any entry but a folder."""
    with suppress(OSError):  # a folder has its name, or the disk is full
        with suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        fd = os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
        with os.fdopen(fd, "wb") as copy, path.open("rb") as file:
            shutil.copyfileobj(file, copy)


def _copy_and_warn(source: Path, target: Path) -> None:
    if left := _copy_regular(source, target):
        _log.warning("%s: left out %d files that are not regular, unreadable or too large", target, left)


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
        if (place / name).is_file():
            if (place / name).stat().st_size:
                return 0  # the harness's own
            (place / name).unlink()
        left = info.st_size
        with (place / name).open("xb") as copy:
            while left and (chunk := file.read(min(left, _CHUNK))):
                copy.write(chunk)
                left -= len(chunk)
        os.utime(place / name, ns=(info.st_atime_ns, info.st_mtime_ns))
    return info.st_size
