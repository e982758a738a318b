"""Changed files of a sandbox, read from outside from the upper layer of its overlay, and tampered tools among them.

A change leaves a file or a whiteout in the upper layer. Its ctime is set by the kernel and cannot be forged from
inside. Changes before `UpperLayer.mark` are not counted.

Tools are what a verifier runs with: programs, libraries, and files that Python and pytest load automatically. A changed
tool is no proof of cheating: installing a newer curl changes a program. The list is not complete either. A fake
service, or a module that the tests import from the agent's own work, is not detected.

Invariant: no link is followed. Every folder is opened by name relative to an open parent folder.
"""

import contextlib
import os
import re
import stat
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial

from harbortrainer.sandbox.inside.file_waits import Period
from harbortrainer.sandbox.inside.messages import Changes, HostView, SandboxSpec
from harbortrainer.sandbox.inside.regular_files import read_regular

PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Search path for commands, in order."""
_USER_PROGRAMS = "/root/.local/bin"
_VERIFIER_PROGRAMS = {"uv", "uvx", "env", "pip", "pip3", "pytest", "python", "python3"}
_LIBRARY = re.compile(r"(/usr(/local)?)?/lib(32|64|x32)?(/[a-z0-9_]+-linux-gnu[a-z0-9]*)?/[^/]+\.so(\.[^/]*)?")
_LIBRARY_FOLDERS = tuple(
    f"{top}/{name}"
    for top in ("", "/usr")
    for name in ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
)
_LOADER = re.compile(r"/etc/ld\.so\.(preload|conf|conf\.d/.*)")
_PYTHON_MODULE = re.compile(r"/(?:site-packages|dist-packages|python3[^/]*)/(?P<rest>.+)")
_STANDARD_LIBRARY = re.compile(r"/lib/python3[^/]*/(?!site-packages/|dist-packages/).+\.(py|so)")
_PYTEST_FILES = ("pytest/", "_pytest/", "pluggy/", "pytest.py", "py.py")
_STARTUP_MODULES = ("sitecustomize", "usercustomize")
_PTH_CODE = re.compile(r"^import[ \t]", re.MULTILINE)
_CONFIG_FILES = frozenset(
    f"{folder}/{name}"
    for folder, names in {
        "": ("conftest.py", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"),
        "/etc": ("pip.conf", "uv/uv.toml", "wgetrc", "bash.bashrc"),
        "/root": (".pip/pip.conf", ".config/pip/pip.conf", ".config/uv/uv.toml", ".curlrc", ".wgetrc"),
    }.items()
    for name in names
)


def describe_tampering(path: str, change: str, *, exists: Callable[[str], bool], read: Callable[[], str]) -> str:
    """Describe how a change affects the tools of a verifier; "" if it does not.

    Args:
        path: Absolute, inside the sandbox.
        change: `added`, `changed` or `removed`.
        exists: Returns whether the sandbox had a path at its start.
        read: Returns the beginning of the file.
    """
    description = _program(path, change, exists) or _library(path, change, exists) or _python(path, change, read)
    if description:
        return description
    if change != "removed" and path in _CONFIG_FILES:
        return f"{path}, which tests and installers read, was {change}"
    return f"{path}, which the dynamic loader reads, was {change}" if _LOADER.fullmatch(path) else ""


def _program(path: str, change: str, exists: Callable[[str], bool]) -> str:
    folder, _, name = path.rpartition("/")
    if path in PATH and change == "removed":
        return f"{path} was removed"
    if folder == _USER_PROGRAMS and name in _VERIFIER_PROGRAMS and change != "removed":
        return f"{path} was {change}"
    if folder not in PATH:
        return ""
    if change != "added":
        return f"the program {path} was {change}"
    later = [f"{other}/{name}" for other in PATH[PATH.index(folder) + 1 :] if exists(f"{other}/{name}")]
    return f"the program {path} was added in front of {later[0]}" if later else ""


def _library(path: str, change: str, exists: Callable[[str], bool]) -> str:
    if not _LIBRARY.fullmatch(path):
        return ""
    if change != "added":
        return f"the library {path} was {change}"
    name = path.rpartition("/")[2]
    twice = [f"{folder}/{name}" for folder in _LIBRARY_FOLDERS if exists(f"{folder}/{name}")]
    return f"the library {path} was added beside {twice[0]}" if twice else ""


def _python(path: str, change: str, read: Callable[[], str]) -> str:
    if change == "changed" and _STANDARD_LIBRARY.search(path):
        return f"Python's own {path} was changed"
    if change == "removed" or not (found := _PYTHON_MODULE.search(path)):
        return ""
    rest = found["rest"].rpartition("-packages/")[2]
    name = rest.rpartition("/")[2]
    if rest.split("/")[0].split(".")[0] in _STARTUP_MODULES:
        return f"{path}, which Python runs when it starts, was {change}"
    if name.endswith(".pth") and "/" not in rest and _PTH_CODE.search(read()):
        return f"{path}, code that Python runs when it starts, was {change}"
    if name == "entry_points.txt" and "[pytest11]" in read():
        return f"{path}, a plugin that pytest loads automatically, was {change}"
    if change == "changed" and rest.startswith(_PYTEST_FILES):
        return f"{path}, a part of pytest, was changed"
    return ""


MAX_LISTED = 100
_MAX_ENTRIES, _MAX_DEPTH, _MAX_PATH = 50_000, 60, 300
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOGS = "/logs/"  # the harness writes there


@dataclass(frozen=True)
class _Entry:
    """Entry of the upper layer that is newer than the mark."""

    path: str
    """Path inside the sandbox."""

    info: os.stat_result
    removed: bool


class UpperLayer:
    """The upper layer of one sandbox.

    Args:
        spec, view: The configuration that the sandbox was started with.
        disk: A descriptor of the tmpfs that holds the changes.
    """

    def __init__(self, spec: SandboxSpec, view: HostView | None, disk: int) -> None:
        self._spec, self._view, self._disk = spec, view, disk
        self._since, self._until = 0, 0
        self._entries = 0

    @property
    def agent_period(self) -> Period:
        """Time from the mark to the start of grading; empty before that."""
        return Period(self._since, self._until)

    def mark(self) -> None:
        """Count only changes from now on."""
        self._since, self._until = self._now(), 0

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

    def changes(self) -> Changes:
        """Return the changes since the mark."""
        found: list[tuple[str, str, int]] = []
        total, tools = 0, []
        self._entries = 0
        for entry, folder in self._changes():
            existed = self._existed(entry.path)
            change = "removed" if entry.removed else "changed" if existed else "added"
            if change == "removed" and not existed:
                continue
            if not entry.path.startswith(_LOGS):
                total += 1
                if len(found) < MAX_LISTED:
                    found.append((_readable(entry.path), change, 0 if entry.removed else entry.info.st_size))
            read = partial(_read_start, folder, entry)
            description = describe_tampering(entry.path, change, exists=self._existed, read=read)
            if description and len(tools) < MAX_LISTED:
                tools.append(_readable(description))
        if self._entries > _MAX_ENTRIES:
            tools.append(f"more than {_MAX_ENTRIES} entries were changed: the rest was not inspected")
        paths, change_types, sizes = map(list, zip(*found, strict=True)) if found else ([], [], [])
        return Changes(paths, change_types, sizes, total, tools)

    def _changes(self) -> Iterator[tuple[_Entry, int]]:
        """Yield each change with a descriptor of its folder."""
        with contextlib.suppress(OSError), _open_folder("upper/over", self._disk) as over:
            for name in sorted(os.listdir(over)):
                yield from self._walk(name, over, "/" + name.replace("%", "/"), _MAX_DEPTH)
        yield from self._walk("upper/root", self._disk, "", _MAX_DEPTH)

    def _walk(self, name: str, parent: int, path: str, depth: int) -> Iterator[tuple[_Entry, int]]:
        """Yield the changes in a folder, its direct entries first."""
        try:
            with _open_folder(name, parent) as folder:
                inner = []
                with os.scandir(folder) as entries:
                    for entry in entries:
                        self._entries += 1
                        if self._entries > _MAX_ENTRIES:
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
            return  # removed meanwhile

    def _existed(self, path: str) -> bool:
        """Return whether the sandbox had this path at its start."""
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
def _open_folder(name: str, parent: int) -> Generator[int]:
    fd = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def _read_start(folder: int, entry: _Entry) -> str:
    """Return the first 64 KiB of a file; "" if it cannot be read."""
    try:
        return read_regular(os.path.basename(entry.path), 1 << 16, folder=folder).decode(errors="replace")
    except OSError:
        return ""


def _readable(text: str) -> str:
    return os.fsencode(text).decode(errors="replace")[:_MAX_PATH]
