"""Unpack and inspect untrusted task folders before any other code reads them.

Invariants: nothing is written outside the task's folder, no link leads out of it, and it has no devices. A task takes
at most `MAX_BYTES` and `MAX_FILES`, since an archive of a few kilobytes can unpack to any size.
"""

import gzip
import io
import os
import stat
import tarfile
from pathlib import Path

from harbortrainer.errors import UserError
from harbortrainer.tar_filter import AT_ONCE, HEADER, BoundedReader, strict_filter
from harbortrainer.tasks.content_key import MAX_DEPTH
from harbortrainer.tasks.task_errors import MACHINE_ERRORS, describe
from harbortrainer.tasks.task_folder import TASK_FILE

MAX_BYTES = 4 << 30
MAX_FILES = 100_000


def unpack_task(packed: bytes, folder: Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
    """Unpack a task's tar archive, gzipped or plain.

    Args:
        packed: The archive.
        folder: An empty folder.
        max_bytes: Largest unpacked size.
        max_files: Most entries.

    Raises:
        UserError: The archive is broken, too large, or has a path outside `folder`, which may hold a part of it.
    """
    raw = io.BytesIO(packed)
    stream = gzip.GzipFile(fileobj=raw) if packed[:2] == b"\x1f\x8b" else raw
    bounded = BoundedReader(stream, max_bytes + HEADER * max_files)
    try:
        with tarfile.open(fileobj=bounded, mode="r:") as tar:
            for number, member in enumerate(tar):
                _check_entry(number, member, max_files)
                tar.extract(member, folder, filter=strict_filter)
            while bounded.read(AT_ONCE):  # read to the end, where gzip has its checksum
                pass
    except Exception as error:  # tarfile raises nearly anything over a crafted header
        if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
            raise
        what = " ".join(str(error).split())[:300] if isinstance(error, tarfile.TarError | OSError) else describe(error)
        raise UserError(f"not a valid task archive: {what}", do="pack it again, or leave it out") from error
    inspect_tree(folder, max_bytes=max_bytes, max_files=max_files)


def _check_entry(number: int, member: tarfile.TarInfo, max_files: int) -> None:
    if number >= max_files:
        raise tarfile.ReadError(f"it has more than {max_files} entries")
    if member.name.count("/") > MAX_DEPTH:
        raise tarfile.ReadError(f"its folders are nested more than {MAX_DEPTH} deep")


def inspect_tree(root: Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
    """Refuse an untrusted folder with devices, pipes, links that lead out of it, or too much data.

    Raises:
        UserError: The first problem found.
    """
    home, size, count = os.path.realpath(root), 0, 0
    for parent, folders, files in os.walk(root):
        if parent.count(os.sep) - os.fspath(root).count(os.sep) > MAX_DEPTH:
            what = f"its folders are nested more than {MAX_DEPTH} deep"
            raise UserError(what, where=str(root), do="leave this task out")
        for name in (*folders, *files):
            path = Path(parent, name)
            found = path.lstat()
            count, size = count + 1, size + (found.st_size if stat.S_ISREG(found.st_mode) else 0)
            if count > max_files or size > max_bytes:
                what = f"has more than {max_files} files or {max_bytes >> 20} MB"
                raise UserError(what, where=str(root), do="leave this task out")
            _refuse_unsafe(path, home, found.st_mode)


def remove_tree(root: Path) -> None:
    """Remove a folder of any depth. `shutil.rmtree` recurses into each folder up to Python 3.12."""
    for parent, folders, files in os.walk(root, topdown=False):
        for name in files:
            os.unlink(os.path.join(parent, name))  # noqa: PTH108, PTH118 - thousands of files
        for name in folders:
            path = Path(parent, name)
            path.unlink() if path.is_symlink() else path.rmdir()
    root.rmdir()


def drop_links_above_tasks(root: Path) -> None:
    """Remove the links outside of tasks, since the search for tasks would follow them."""
    for parent, folders, files in os.walk(root):
        if TASK_FILE in files:
            folders.clear()
            continue
        for name in (*folders, *files):
            if Path(parent, name).is_symlink():
                Path(parent, name).unlink()


def _refuse_unsafe(path: Path, home: str, mode: int) -> None:
    if stat.S_ISLNK(mode):
        target = path.readlink()
        inside = os.path.realpath(path).startswith(home + os.sep)
        if target.is_absolute() or not inside:
            raise UserError(f"the link {path.name} leads out of the task", where=str(path), do="leave this task out")
    elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError("is a device or a pipe", where=str(path), do="leave this task out")
