"""Files of lines that are sealed once nobody writes them: zstd beside the plain file, which is then removed.

Contract: a file is named by its plain path, and offsets are those of its text, so both stay valid when it is sealed.
Sealed files have independent frames and a table of them (zstd's seekable format): a seek decompresses one frame.

Invariants: where both files exist, the plain one is read. A sealed file is complete, also after `kill -9`. A reader
finds one of them at any moment.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from harbortrainer.errors import UserError, first_line
from harbortrainer.runs.durable import flush

SEALED = ".zst"
"""Suffix that a sealed file has after its plain name."""
FRAME_BYTES = 4_000_000
"""Bytes of text that a frame has at most: a trial's page decompresses one or two."""
CHUNK_BYTES = 1_000_000


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


def seal(path: Path) -> None:
    """Seal a file that nobody writes any more; a file that has grown meanwhile stays plain.

    Lines that were added after an earlier seal, to a new plain file, follow the sealed ones. A call after a kill
    completes the seal.
    """
    if not _restore_start(path):
        return
    size = path.stat().st_size
    with path.open("rb") as plain:
        write_sealed(path, _chunks(plain))
    if path.stat().st_size == size:
        path.unlink()


def write_sealed(path: Path, text: Iterable[bytes]) -> None:
    """Write the sealed form of a file, in place of an earlier one; a plain file beside it stays."""
    from pyzstd import SeekableZstdFile

    target = sealed_path(path)
    with _draft(target) as draft:
        with SeekableZstdFile(draft, "wb", max_frame_content_size=FRAME_BYTES) as out:
            for part in text:
                out.write(part)
        flush(draft)
        draft.replace(target)


def _restore_start(path: Path) -> bool:
    """Put the sealed text before the lines of a plain file, unless it begins with that text; return whether it does."""
    if not sealed_path(path).exists():
        return True
    with _open_sealed(sealed_path(path)) as sealed, path.open("rb") as plain:
        if all(part == plain.read(len(part)) for part in _chunks(sealed)):
            return True
        sealed.seek(0)
        plain.seek(0)
        size = path.stat().st_size
        with _draft(path) as draft:
            with draft.open("wb") as out:
                out.writelines(_chunks(sealed))
                out.writelines(_chunks(plain))
            flush(draft)
            if path.stat().st_size != size:
                return False
            draft.replace(path)
    return True


@contextmanager
def _draft(path: Path) -> Generator[Path]:
    """Yield the path of a draft of a file, to be renamed; after an error, none is left."""
    draft = path.with_name(f".{path.name}.part")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)
    flush(path.parent)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while part := file.read(CHUNK_BYTES):
        yield part


@lru_cache(maxsize=100_000)
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
        what = f"is damaged ({first_line(error)})"
        raise UserError(what, where=str(file), do="restore the file, or remove it to read the others") from None
