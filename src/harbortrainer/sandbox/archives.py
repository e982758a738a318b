"""Pack and unpack the tar archives in which files enter and leave a sandbox, on the host's side.

`inside.file_calls` is the counterpart inside the sandbox.

Invariants:
- The host never opens a path inside a sandbox.
- An archive from a sandbox writes nothing outside its target folder. Unsafe members are skipped, never followed.
"""

import logging
import os
import shutil
import tarfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from harbortrainer.tar_filter import strict_filter

_log = logging.getLogger(__name__)


def archive(source: Path, name: str | None = None) -> int:
    """Pack a folder's content, or one file under `name`, into a tar archive in memory.

    In memory, so that no process in the sandbox ever holds a descriptor of a host file.

    Returns:
        The archive's descriptor, at its start. The caller closes it.
    """
    with _memory_archive() as (fd, tar):
        for path, arcname in [(source.resolve(), name)] if name else _entries(source):
            tar.add(path, arcname=arcname, filter=_anonymous)
    return fd


@contextmanager
def _memory_archive() -> Generator[tuple[int, tarfile.TarFile]]:
    """Yield the descriptor of an empty archive and the archive to fill; rewind the descriptor at the end."""
    fd = os.memfd_create("upload", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            yield fd, tar
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:  # nobody else closes the descriptor
        os.close(fd)
        raise


def _entries(source: Path) -> list[tuple[Path, str]]:
    return [(entry, entry.name) for entry in sorted(source.iterdir())]


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def copy_out(content: BinaryIO, target: Path) -> None:
    """Write a downloaded file to `target` on the host, replacing an existing file or link.

    It is executable if it was so in the sandbox; `content` has its permissions.
    """
    content.seek(0)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    with target.open("xb") as file:
        shutil.copyfileobj(content, file)
        executable = os.fstat(content.fileno()).st_mode & 0o111
        os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode | executable)


def unpack(archive: BinaryIO, target: Path) -> None:
    """Unpack an archive from a sandbox, without devices and without links that lead out of `target`."""
    archive.seek(0)
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=archive, mode="r|") as tar:
        tar.extractall(target, filter=_safe)


def _safe(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo | None:
    if member.isdev():
        return None
    try:
        return strict_filter(member, target)
    except tarfile.FilterError as error:
        _log.warning("skipped an unsafe file in a download from a sandbox: %s", error)
        return None


def move_matching(source: Path, target: Path, choose: Callable[[list[str]], list[str]], always: Iterable[str]) -> None:
    """Move selected files from one host folder to another.

    Args:
        source: The folder to move from. Paths in `choose` and `always` are relative to it.
        target: The folder to move to, created if it is missing.
        choose: Returns the paths to move, out of all paths in `source`.
        always: Paths to move whatever `choose` returns.
    """
    names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
    for name in {*choose(names), *always}.intersection(names):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source / name, target / name)
