"""The host's side of files in and out of a sandbox: tar archives, made and unpacked here (inside: `inside.file_calls`).

Invariant: no path inside a sandbox is ever opened from the host, and nothing that comes out of one can name a place
outside the folder it is unpacked into. What cannot be unpacked safely is left out, never followed.
"""

import logging
import os
import shutil
import tarfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_log = logging.getLogger(__name__)


def archive(source: Path, name: str | None = None) -> int:
    """A descriptor, at its start, of a tar archive in memory: a folder's content, or one file, called `name` in it.

    In memory, so that nothing inside the sandbox ever holds a descriptor of a file of the host's. The caller closes it.
    """
    with _in_memory() as (fd, tar):
        for path, arcname in [(source.resolve(), name)] if name else _entries(source):
            tar.add(path, arcname=arcname, filter=_anonymous)
    return fd


def uncompressed(source: Path) -> int:
    """A descriptor, at its start, of the content of a tar file of any compression, as a plain archive in memory."""
    with _in_memory() as (fd, new), tarfile.open(source) as old:
        for member in old:
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
    return fd


@contextmanager
def _in_memory() -> Generator[tuple[int, tarfile.TarFile]]:
    """An empty archive to fill, and its descriptor, which is at its start again in the end."""
    fd = os.memfd_create("upload", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            yield fd, tar
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:  # whoever fills it is told of its failure; the descriptor is ours alone to close
        os.close(fd)
        raise


def _entries(source: Path) -> list[tuple[Path, str]]:
    return [(entry, entry.name) for entry in sorted(source.iterdir())]


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def copy_out(content: BinaryIO, target: Path) -> None:
    """Write what came out of a sandbox to a file of the host's, replacing what is there (a link, too)."""
    content.seek(0)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    with target.open("xb") as file:
        shutil.copyfileobj(content, file)


def unpack(archive: BinaryIO, target: Path) -> None:
    """Unpack an archive that came from a sandbox. Devices, and links that lead out of `target`, are left out."""
    archive.seek(0)
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=archive, mode="r|") as tar:
        tar.extractall(target, filter=_safe)


def _safe(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo | None:
    if member.isdev():
        return None
    try:
        return tarfile.data_filter(member, target)
    except tarfile.FilterError as error:
        _log.warning("left out of a download from a sandbox: %s", error)
        return None


def move_chosen(source: Path, target: Path, choose: Callable[[list[str]], list[str]], always: Iterable[str]) -> None:
    """Move files of one folder of the host's into another.

    Args:
        source: Its files' paths, from here on, are what `choose` is asked about.
        target: Made where it is not there.
        choose: Which of them are moved.
        always: Which of them are moved in any case.
    """
    names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
    for name in {*choose(names), *always}.intersection(names):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source / name, target / name)
