"""File transfer calls that run inside the sandbox, so that a planted link cannot lead outside it.

Small calls run in the init process itself, which must never block: files are opened without following links and
without waiting. Other calls run in a forked child.
"""

import errno
import itertools
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator

from harbortrainer.sandbox.inside.regular_files import open_regular

# tarfile looks up the owners' names: from /etc/passwd, which may be a pipe, and with libraries that an agent may have
# added. Nobody needs the names.
for _lookup in ("pwd", "grp"):
    setattr(tarfile, _lookup, None)

_SMALL_BYTES, _SMALL_ENTRIES = 8 << 20, 500
_MAX_NOTES = 20
_MAX_ENTRIES, _MAX_DEPTH = 20_000, 64  # of an archive that leaves the sandbox: the host checks every name in it
_MAX_ROUNDS = 100_000
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(fds: list[int], folder: str) -> int:
    """Unpack the archive on standard input into a folder, created if missing. Existing entries are replaced."""
    os.makedirs(folder, exist_ok=True)
    folders = []
    with os.fdopen(os.dup(fds[0]), "rb") as source, tarfile.open(fileobj=source, mode="r|") as tar:
        for member in tar:
            path = os.path.join(folder, member.name)
            if member.isdir():
                _clear(path, keep_folder=True)
                os.makedirs(path, exist_ok=True)
                folders.append((path, member))
                continue
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _clear(path, keep_folder=False)
            _write(tar, member, path, folder)
    for path, member in folders:
        os.chmod(path, member.mode)
    return 0


def _clear(path: str, *, keep_folder: bool) -> None:
    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_folder:
        os.unlink(path)
    elif not keep_folder:
        _remove_tree(path)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str, folder: str) -> None:
    if member.issym():
        os.symlink(member.linkname, path)
    elif member.islnk():
        os.link(os.path.join(folder, member.linkname), path, follow_symlinks=False)
    elif member.isreg() and (content := tar.extractfile(member)) is not None:
        with os.fdopen(os.open(path, _NEW, 0o600), "wb") as file:
            shutil.copyfileobj(content, file)
            os.fchmod(file.fileno(), member.mode)
        os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)


def pack(fds: list[int], folder: str, limit: str) -> int:
    """Write an archive of a folder's content to standard output. It holds only folders, files and links.

    Args:
        limit: Maximum bytes, by the files' stated sizes. A file above it is omitted and named on standard error.
            Entries after the first `_MAX_ENTRIES` are omitted too, and mentioned there.
    """
    remaining, notes = int(limit), 0
    entries = _walk(folder, _MAX_DEPTH)
    with os.fdopen(os.dup(fds[1]), "wb") as sink, tarfile.open(fileobj=sink, mode="w|") as tar:
        for path, name in itertools.islice(entries, _MAX_ENTRIES):
            try:
                remaining -= _add(tar, path, name, remaining)
            except (OSError, ValueError) as error:
                notes += 1
                if notes <= _MAX_NOTES:
                    os.write(fds[2], f"left out: {name}: {error}\n".encode())
    if next(entries, None) is not None:
        os.write(fds[2], f"left out: all but {_MAX_ENTRIES} files and folders\n".encode())
    return 0


def _add(tar: tarfile.TarFile, path: str, name: str, limit: int) -> int:
    """Add one entry of at most `limit` bytes. Return its size; raise before writing if it cannot be added."""
    member = tar.gettarinfo(path, name)
    if member is None or member.isdev():
        raise ValueError("not a file, folder or link")
    if member.size > limit:
        raise ValueError("too large")
    if not member.isreg():
        tar.addfile(member)
        return 0
    fd = open_regular(path)
    try:
        tar.addfile(member, _FixedSizeReader(fd, member.size))
    finally:
        os.close(fd)
    return member.size


def send_file(fds: list[int], path: str, limit: str) -> int:
    """Write one regular file to standard output, and give its permissions to an output in memory."""
    fd = open_regular(path, follow=True)
    try:
        found = os.fstat(fd)
        if found.st_size > int(limit):
            os.write(fds[2], f"{path}: too large\n".encode())
            return 1
        if stat.S_ISREG(os.fstat(fds[1]).st_mode):
            os.fchmod(fds[1], found.st_mode & 0o777)
        while os.sendfile(fds[1], fd, None, 1 << 20):
            pass
    finally:
        os.close(fd)
    return 0


def empty_folders(_: list[int], mode: str, *folders: str) -> int:
    """Empty the folders, and create the missing ones. Any other entry with such a name is replaced.

    Args:
        mode: Permissions in octal; "" keeps the present ones.
    """
    for folder in folders:
        _clear(folder, keep_folder=True)
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(folder):
            _clear(f"{folder}/{name}", keep_folder=False)
        if mode:
            os.chmod(folder, int(mode, 8))
    return 0


def is_kind(_: list[int], kind: str, path: str) -> int:
    """Return 0 if the path is a folder (kind `d`) or a regular file (`f`), following links; else 1."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return 1
    return 0 if (stat.S_ISDIR if kind == "d" else stat.S_ISREG)(mode) else 1


def make_executable(_: list[int], path: str) -> int:
    """Make a file executable for all users, following links."""
    os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | 0o111)
    return 0


CALLS: dict[str, Callable[..., int]] = {
    "unpack": unpack,
    "pack": pack,
    "send": send_file,
    "empty": empty_folders,
    "is": is_kind,
    "executable": make_executable,
}


def is_small(fds: list[int], name: str, *arguments: str) -> bool:
    """Return whether a call takes only milliseconds, so that the init process may run it itself.

    Output to a pipe may block, so it must go to a file in memory.
    """
    if name in ("is", "executable"):
        return True
    if name == "unpack":
        return os.fstat(fds[0]).st_size <= _SMALL_BYTES and stat.S_ISREG(os.fstat(fds[0]).st_mode)
    if name == "empty":
        return all(map(_is_small, arguments[1:]))
    return stat.S_ISREG(os.fstat(fds[1]).st_mode) and _is_small(arguments[0])


def _is_small(path: str) -> bool:
    """Return whether a file, or a folder with its content, is within the limits of a small call."""
    try:
        if os.path.isdir(path):
            entries = itertools.islice(_walk(path, _SMALL_ENTRIES), _SMALL_ENTRIES + 1)
            sizes = [os.lstat(entry).st_size for entry, _ in entries]
        else:
            sizes = [os.stat(path).st_size]
    except OSError:
        return True  # a missing path fails fast
    return len(sizes) <= _SMALL_ENTRIES and sum(sizes) <= _SMALL_BYTES


def _walk(folder: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield (path, relative name) of every entry down to a depth. Iterative: an agent can nest folders very deep."""
    pending = [(folder, "", depth)]
    while pending:
        top, prefix, depth = pending.pop()
        try:
            entries = os.scandir(top)
        except OSError:
            if top == folder:
                raise
            continue
        with entries:
            for entry in entries:
                yield entry.path, prefix + entry.name
                if depth > 1 and entry.is_dir(follow_symlinks=False):
                    pending.append((entry.path, f"{prefix}{entry.name}/", depth - 1))


def _remove_tree(top: str) -> None:
    """Remove a folder of any depth. Nested folders are moved up, which avoids long paths and recursion."""
    names = itertools.count()
    for _ in range(_MAX_ROUNDS):
        folders = []
        for name in os.listdir(top):
            if not _try_remove(f"{top}/{name}"):
                folders.append(f"{top}/{name}")
        if not folders:
            os.rmdir(top)
            return
        for folder in folders:
            for name in os.listdir(folder):
                if not _try_remove(f"{folder}/{name}"):
                    os.rename(f"{folder}/{name}", f"{top}/.removed-{os.getpid()}-{next(names)}")
    raise OSError(errno.EBUSY, f"cannot empty {top}: a process keeps adding files")


def _try_remove(path: str) -> bool:
    """Remove a file, a link or an empty folder. Return False for a folder that is not empty."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.rmdir(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


class _FixedSizeReader:
    """Reader that returns exactly `size` bytes, even if the file shrinks or grows meanwhile."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._remaining = fd, size

    def read(self, count: int = -1) -> bytes:
        wanted = self._remaining if count < 0 else min(count, self._remaining)
        self._remaining -= wanted
        return os.read(self._fd, wanted).ljust(wanted, b"\0")
