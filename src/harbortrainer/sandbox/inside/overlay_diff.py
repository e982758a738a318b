"""Changed files of a sandbox, read from outside from the upper layer of its overlay, and tampered tools among them.

A change leaves a file or a whiteout in the upper layer; a folder that was removed and made again is opaque there, or
takes the place of a link. The
ctime of a change is set by the kernel and cannot be forged from inside. Changes before `UpperLayer.mark` are not
counted.

Invariant: no link is followed. Every folder is opened by name relative to an open parent folder.
"""

import contextlib
import os
import stat
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from harbortrainer.sandbox.inside import syscalls as k
from harbortrainer.sandbox.inside.file_waits import Period
from harbortrainer.sandbox.inside.messages import Changes, HostView, SandboxSpec
from harbortrainer.sandbox.inside.regular_files import read_in_root, read_regular
from harbortrainer.sandbox.inside.verifier_tools import Change, VerifierTools

MAX_LISTED = 100
TEXT_B, ALL_TEXTS_B = 4096, 32768
"""Bytes of the longest text that is kept, and of all kept texts."""
_MAX_ENTRIES, _MAX_DEPTH, _MAX_PATH = 50_000, 60, 300
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOGS = "/logs/"  # the harness writes there
_READ_B = 1 << 20
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


@dataclass(frozen=True)
class _Entry:
    """Entry of the upper layer that is newer than the mark."""

    path: str
    """Path inside the sandbox."""

    info: os.stat_result
    removed: bool = False

    @property
    def kind(self) -> str:
        """What is there now: a `file`, `link` or `folder`."""
        mode = self.info.st_mode
        return "folder" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "file"


@dataclass(frozen=True)
class _Original:
    """What the sandbox had at a path at its start."""

    is_folder: bool
    root: str | None = None
    """Folder of the image's layer that has it; None if it is the host's."""
    path: str = ""
    """Path in that folder."""


class UpperLayer:
    """The upper layer of one sandbox.

    Args:
        spec, view: The configuration that the sandbox was started with.
        disk: A descriptor of the tmpfs that holds the changes. For a container, a folder for the mark's file.
        root: Folder with the changes of the root filesystem.
        mounts: Files and folders that are mounted over the overlay: path outside by path inside.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        view: HostView | None,
        disk: int,
        *,
        root: str = "upper/root",
        mounts: Mapping[str, str] | None = None,
    ) -> None:
        self._spec, self._view, self._disk = spec, view, disk
        self._root, self._mounts = root, mounts or {}
        self._mounted: dict[str, bytes] = {}
        self._tools = VerifierTools(self._existed, spec.search_path)
        self._since, self._until = 0, 0
        self._entries, self._texts_left = 0, 0

    @property
    def agent_period(self) -> Period:
        """Time from the mark to the start of grading; empty before that."""
        return Period(self._since, self._until)

    def mark(self) -> None:
        """Count only changes from now on."""
        self._since, self._until = self._now(), 0
        self._mounted = {path: _content(source) for path, source in self._mounts.items()}

    def mark_grading(self) -> None:
        """Record the start of grading, unless it is recorded."""
        self._until = self._until or self._now()

    def _now(self) -> int:
        """Return the time of the files' clock, in nanoseconds."""
        fd = os.open(
            ".mark", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._disk
        )
        try:
            os.write(fd, b".")
            return os.fstat(fd).st_ctime_ns
        finally:
            os.close(fd)
            os.unlink(".mark", dir_fd=self._disk)

    def changes(self) -> Changes:
        """Return the changes since the mark."""
        listed: list[tuple[str, str, int, str | None, str | None]] = []
        total, tools = 0, []
        self._entries, self._texts_left = 0, ALL_TEXTS_B
        for entry, folder in self._changes():
            original = self._original(entry.path)
            change = "removed" if entry.removed else "changed" if original else "added"
            if change == "removed" and not original:
                continue
            if not entry.path.startswith(_LOGS) and entry.kind != "folder":
                total += 1
                if len(listed) < MAX_LISTED:
                    size = 0 if entry.removed else entry.info.st_size
                    listed.append((_readable(entry.path), change, size, *self._texts(original, folder, entry)))
            target = _target(folder, entry) if entry.kind == "link" else ""
            read = partial(_read, folder, entry)
            description = self._tools.describe(Change(entry.path, change, entry.kind, target, read))
            if description and len(tools) < MAX_LISTED:
                tools.append(_readable(description))
        if self._entries > _MAX_ENTRIES:
            tools.append(f"more than {_MAX_ENTRIES} entries were changed: the rest was not inspected")
        columns = map(list, zip(*listed, strict=True)) if listed else ([], [], [], [], [])
        return Changes(*columns, total, tools)

    def _texts(self, original: _Original | None, folder: int, entry: _Entry) -> tuple[str | None, str | None]:
        """Return the texts of a file at the start and now, if they differ; None where none is kept."""
        before = _read_original(original) if original is not None else b""
        after = _content_at(folder, entry, TEXT_B) if not entry.removed else b""
        if before is None or after is None or before == after or b"\0" in before + after:
            return None, None
        if len(before) + len(after) > self._texts_left:
            return None, None
        try:
            texts = before.decode(), after.decode()
        except UnicodeDecodeError:
            return None, None
        self._texts_left -= len(before) + len(after)
        return (texts[0] if original is not None else None), (None if entry.removed else texts[1])

    def _changes(self) -> Iterator[tuple[_Entry, int]]:
        """Yield each change with a descriptor of its folder."""
        with contextlib.suppress(OSError), _open_folder("upper/over", self._disk) as over:
            for name in sorted(os.listdir(over)):
                yield from self._walk(name, over, "/" + name.replace("%", "/"), _MAX_DEPTH)
        yield from self._walk(self._root, self._disk, "", _MAX_DEPTH)
        for path, source in self._mounts.items():
            yield from self._walk(source, self._disk, path, _MAX_DEPTH)
            # Docker changes the owner of these files now and then, so their ctime says nothing.
            if self._mounted[path] != _content(source):
                yield _Entry(path, os.stat(source)), self._disk

    def _walk(self, name: str, parent: int, path: str, depth: int) -> Iterator[tuple[_Entry, int]]:
        """Yield the changes in a folder: itself, its direct entries, then those below."""
        try:
            opened = os.open(name, _FOLDER, dir_fd=parent)
        except OSError:
            return  # removed meanwhile
        try:
            here, original = _Entry(path, os.fstat(opened)), self._original(path)
            if (
                here.info.st_ctime_ns > self._since
                and original is not None
                and (not original.is_folder or _is_opaque(opened))
            ):
                yield here, parent
            inner = []
            for entry in self._scan(opened, path):
                inner += [entry.path.rpartition("/")[2]] if entry.kind == "folder" else []
                if entry.kind != "folder" and entry.info.st_ctime_ns > self._since:
                    yield entry, opened
            for below in inner if depth else ():
                yield from self._walk(below, opened, f"{path}/{below}", depth - 1)
        finally:
            os.close(opened)

    def _scan(self, folder: int, path: str) -> Iterator[_Entry]:
        """Yield the entries of a folder that are files, links, folders or whiteouts."""
        with os.scandir(folder) as entries:
            for entry in entries:
                if self._entries > _MAX_ENTRIES:
                    return
                with contextlib.suppress(OSError):  # removed meanwhile
                    info = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
                    self._entries += info.st_ctime_ns > self._since
                    removed = stat.S_ISCHR(info.st_mode) and info.st_rdev == 0
                    if removed or stat.S_IFMT(info.st_mode) in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
                        yield _Entry(f"{path}/{entry.name}", info, removed)

    def _existed(self, path: str) -> bool:
        """Return whether the sandbox had this path at its start."""
        return self._original(path) is not None

    def _original(self, path: str) -> _Original | None:
        """Return what the sandbox had at a path at its start; None for nothing."""
        area, rest = "root", path
        if self._view is not None:
            for shown in self._view.shown:
                if path == shown or path.startswith(f"{shown}/"):
                    area, rest = f"over/{shown.strip('/').replace('/', '%')}", path[len(shown) :]
            lowers = [None] if area != "root" else []
            if area == "root" and (path in self._view.plain or path in self._view.links):
                return _Original(is_folder=False)
        else:
            lowers = self._spec.lowers or [self._spec.rootfs]
        layer = [f"{self._spec.layer}/{area}"] if self._spec.layer else []
        for root in (*layer, *lowers):
            with contextlib.suppress(OSError):
                info = _lstat("/", path) if root is None else _lstat(root, rest)
                removed = stat.S_ISCHR(info.st_mode) and info.st_rdev == 0
                return None if removed else _Original(stat.S_ISDIR(info.st_mode), root, rest)
        return None


@contextlib.contextmanager
def _open_folder(name: str, parent: int | None = None) -> Generator[int]:
    fd = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def _content(path: str) -> bytes:
    """Return the first MiB of a file outside; b"" for a folder."""
    try:
        return read_regular(path, _READ_B)
    except OSError:
        return b""


def _is_opaque(folder: int) -> bool:
    """Whether an upper folder hides the lower ones."""
    for name in _OPAQUE:
        with contextlib.suppress(OSError):
            return os.getxattr(folder, name) == b"y"
    return False


def _target(folder: int, entry: _Entry) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(os.path.basename(entry.path), dir_fd=folder)
    return ""


def _read(folder: int, entry: _Entry) -> str | None:
    """Return a file's text; None if it is no file, over 1 MiB, or unreadable."""
    content = _content_at(folder, entry, _READ_B)
    return None if content is None else content.decode(errors="replace")


def _content_at(folder: int, entry: _Entry, most: int) -> bytes | None:
    """Return a file's content; None if it is no file, over `most` bytes, or unreadable."""
    try:
        content = read_regular(os.path.basename(entry.path), most + 1, folder=folder)
    except OSError:
        return None
    return content if len(content) <= most else None


def _lstat(root: str, path: str) -> os.stat_result:
    """Return the information on a path below `root`; OSError if a link is on the way, since it leads elsewhere."""
    os.lstat(root + path)  # missing, mostly: one call
    with _open_folder(root) as top:
        found = k.open_in_root(top, path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, follow=False)
    try:
        return os.fstat(found)
    finally:
        os.close(found)


def _read_original(original: _Original) -> bytes | None:
    """Return the content of a short file of the image; None if it is no file, long, unreadable, or the host's."""
    if original.root is None:
        return None
    try:
        with _open_folder(original.root) as root:
            content = read_in_root(root, original.path, TEXT_B + 1)
    except OSError:
        return None
    return content if len(content) <= TEXT_B else None


def _readable(text: str) -> str:
    return os.fsencode(text).decode(errors="replace")[:_MAX_PATH]
