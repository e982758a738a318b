"""Files of lines that their writer may seal: compress with zstd, beside the plain file, which it then removes.

Contract: a file is named by its plain path, and offsets are those of its text, so both stay valid when it is sealed.
Sealed files have independent frames and a table of them (zstd's seekable format): a seek decompresses one frame.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from harbortrainer.errors import UserError

SEALED = ".zst"
"""Suffix that a sealed file has after its plain name."""


class FileStatus(NamedTuple):
    """State of a file."""

    inode: int
    size: int
    """Bytes of the text."""
    sealed: bool


def sealed_path(path: Path) -> Path:
    """Return the path of a file once it is sealed."""
    return path.with_name(path.name + SEALED)


def plain_path(path: Path) -> Path:
    """Return the plain path of a file that may be sealed."""
    return path.with_name(path.name.removesuffix(SEALED))


@contextmanager
def open_lines(path: Path) -> Generator[BinaryIO]:
    """Open a file for reading, plain or sealed.

    Raises:
        FileNotFoundError: There is neither.
        UserError: The sealed file is damaged.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        with _open_sealed(sealed_path(path)) as sealed:
            yield sealed
        return
    with file:
        yield file


def status_of(path: Path) -> FileStatus | None:
    """Return the state of a file; None if there is neither a plain nor a sealed one.

    Raises:
        UserError: The sealed file is damaged.
    """
    for file in (path, sealed_path(path)):
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        sealed = file != path
        size = _text_size(file, status.st_ino, status.st_size) if sealed else status.st_size
        return FileStatus(status.st_ino, size, sealed)
    return None


def numbered_files(folder: Path) -> Iterator[Path]:
    """Yield the plain paths of the files `NNNNN.jsonl` of a folder, in their order."""
    found = {plain_path(path) for pattern in ("*.jsonl", f"*.jsonl{SEALED}") for path in folder.glob(pattern)}
    yield from sorted((path for path in found if path.stem.isdecimal()), key=lambda path: int(path.stem))


@lru_cache(maxsize=1024)
def _text_size(file: Path, _inode: int, _size: int) -> int:
    with _open_sealed(file) as sealed:
        return sealed.seek(0, 2)


@contextmanager
def _open_sealed(file: Path) -> Generator[BinaryIO]:
    from pyzstd import SeekableFormatError, SeekableZstdFile, ZstdError

    try:
        with SeekableZstdFile(file, "rb") as sealed:
            yield cast(BinaryIO, sealed)
    except (SeekableFormatError, ZstdError, EOFError) as error:
        what = f"is damaged ({str(error).splitlines()[0]})"
        raise UserError(what, where=str(file), do="restore the file, or remove it to read the others") from None
