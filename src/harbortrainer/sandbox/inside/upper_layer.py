"""What was changed in a sandbox, read from the upper layer of its filesystem, from outside.

A change leaves a file in the upper layer, or a mark that covers one that was removed; its change time is the kernel's,
which nobody inside can set. What lay there before `mark` is not counted.

Invariant: no link is followed. Every folder is opened by its name in one that is open.
"""

import contextlib
import os
import stat
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from harbortrainer.sandbox.inside import changed_tools
from harbortrainer.sandbox.inside.messages import Changed, HostView, SandboxSpec

MOST_LISTED = 100
_MOST_ENTRIES, _MOST_DEPTH, _MOST_PATH = 50_000, 60, 300
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOGS = "/logs/"  # the harness writes there


@dataclass(frozen=True)
class _Entry:
    """An entry of the upper layer that is newer than the mark."""

    path: str
    """Inside the sandbox."""

    info: os.stat_result
    removed: bool


class UpperLayer:
    """The upper layer of one sandbox.

    Args:
        spec, view: What it was made of.
        disk: A descriptor of the tmpfs that changes land in.
    """

    def __init__(self, spec: SandboxSpec, view: HostView | None, disk: int) -> None:
        self._spec, self._view, self._disk = spec, view, disk
        self._since = 0
        self._entries = 0

    def mark(self) -> None:
        """Count from now on."""
        fd = os.open(
            ".mark", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._disk
        )
        try:
            os.write(fd, b".")
            self._since = os.fstat(fd).st_ctime_ns
        finally:
            os.close(fd)

    def look(self) -> Changed:
        """What was changed since the mark."""
        found: list[tuple[str, str, int]] = []
        total, tools = 0, []
        self._entries = 0
        for entry, folder in self._changes():
            below = self._below(entry.path)
            how = "removed" if entry.removed else "changed" if below else "added"
            if how == "removed" and not below:
                continue
            if not entry.path.startswith(_LOGS):
                total += 1
                if len(found) < MOST_LISTED:
                    found.append((_readable(entry.path), how, 0 if entry.removed else entry.info.st_size))
            said = changed_tools.said_of(
                entry.path, how, exists=self._below, read=lambda f=folder, e=entry: _text(f, e)
            )
            if said and len(tools) < MOST_LISTED:
                tools.append(_readable(said))
        if self._entries > _MOST_ENTRIES:
            tools.append(f"more than {_MOST_ENTRIES} entries were changed: not all were looked at")
        paths, hows, sizes = map(list, zip(*found, strict=True)) if found else ([], [], [])
        return Changed(paths, hows, sizes, total, tools)

    def _changes(self) -> Iterator[tuple[_Entry, int]]:
        """Each change, with a descriptor of the folder that it lies in."""
        with contextlib.suppress(OSError), _opened("upper/over", self._disk) as over:
            for name in sorted(os.listdir(over)):
                yield from self._walk(name, over, "/" + name.replace("%", "/"), _MOST_DEPTH)
        yield from self._walk("upper/root", self._disk, "", _MOST_DEPTH)

    def _walk(self, name: str, parent: int, path: str, depth: int) -> Iterator[tuple[_Entry, int]]:
        """The changes in a folder: those that lie in it first."""
        try:
            with _opened(name, parent) as folder:
                inner = []
                with os.scandir(folder) as entries:
                    for entry in entries:
                        self._entries += 1
                        if self._entries > _MOST_ENTRIES:
                            return
                        info = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
                        inner += [entry.name] if stat.S_ISDIR(info.st_mode) else []
                        removed = stat.S_ISCHR(info.st_mode) and info.st_rdev == 0
                        counts = removed or stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)
                        if counts and info.st_ctime_ns > self._since:
                            yield _Entry(f"{path}/{entry.name}", info, removed), folder
                for below in inner if depth else ():
                    yield from self._walk(below, folder, f"{path}/{below}", depth - 1)
        except OSError:
            return  # it is gone meanwhile

    def _below(self, path: str) -> bool:
        """Whether the sandbox started with something at this path."""
        area, rest = "root", path
        if self._view is not None:
            for shown in self._view.shown:
                if path == shown or path.startswith(f"{shown}/"):
                    area, rest = f"over/{shown.strip('/').replace('/', '%')}", path[len(shown) :]
            lowers = [path] if area != "root" else []
            if area == "root" and (path in self._view.plain or path in self._view.links):
                return True
        else:
            lowers = [f"{lower}{path}" for lower in self._spec.lowers or [self._spec.rootfs]]
        layer = [f"{self._spec.layer}/{area}{rest}"] if self._spec.layer else []
        for candidate in (*layer, *lowers):
            with contextlib.suppress(OSError):
                info = os.lstat(candidate)
                return not (stat.S_ISCHR(info.st_mode) and info.st_rdev == 0)
        return False


@contextlib.contextmanager
def _opened(name: str, parent: int) -> Generator[int]:
    fd = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def _text(folder: int, entry: _Entry) -> str:
    """The beginning of a file."""
    if not stat.S_ISREG(entry.info.st_mode):
        return ""
    try:
        fd = os.open(os.path.basename(entry.path), _FILE, dir_fd=folder)
    except OSError:
        return ""
    try:
        return os.read(fd, 1 << 16).decode(errors="replace")
    finally:
        os.close(fd)


def _readable(text: str) -> str:
    return os.fsencode(text).decode(errors="replace")[:_MOST_PATH]
