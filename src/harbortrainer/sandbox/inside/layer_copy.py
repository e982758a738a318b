"""Copies a small layer into a sandbox's own upper folder, so that the task's files behave as on a plain disk.

A layer below an overlay has its oddities: a hard link to one of its files breaks, inode numbers change on the first
write. A copy of a few files costs less than the mounts that it saves.
"""

import os
import stat

_KEPT = ("trusted.overlay.opaque", "user.overlay.opaque", "security.capability")
_CHUNK = 1 << 20


def copy_tree(source: str, target: str) -> None:
    """Copy the content of a folder into another, with owners, modes, times, links, and overlay marks."""
    _copy_folder(source, target, {})


def copy_file(source: str, target: str) -> None:
    """Copy one file with its mode and times."""
    info = os.stat(source)
    _copy_content(source, target)
    _copy_marks(source, target, info)


def _copy_folder(source: str, target: str, linked: dict[tuple[int, int], str]) -> None:
    with os.scandir(source) as entries:
        for entry in entries:
            info, path = entry.stat(follow_symlinks=False), f"{target}/{entry.name}"
            first = linked.setdefault((info.st_dev, info.st_ino), path)
            if first != path and not stat.S_ISDIR(info.st_mode):
                os.link(first, path, follow_symlinks=False)
                continue
            _copy_entry(entry.path, path, info)
            if stat.S_ISDIR(info.st_mode):
                _copy_folder(entry.path, path, linked)
            _copy_marks(entry.path, path, info)


def _copy_entry(source: str, target: str, info: os.stat_result) -> None:
    if stat.S_ISDIR(info.st_mode):
        os.mkdir(target)
    elif stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(info.st_mode):
        _copy_content(source, target)
    else:  # a whiteout (device 0, 0) or a named pipe
        os.mknod(target, info.st_mode, info.st_rdev)


def _copy_content(source: str, target: str) -> None:
    read = os.open(source, os.O_RDONLY)
    write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        while os.sendfile(write, read, None, _CHUNK):
            pass
    finally:
        os.close(read)
        os.close(write)


def _copy_marks(source: str, target: str, info: os.stat_result) -> None:
    os.chown(target, info.st_uid, info.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(target, stat.S_IMODE(info.st_mode))
    for name in os.listxattr(source, follow_symlinks=False):
        if name in _KEPT:
            os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)
