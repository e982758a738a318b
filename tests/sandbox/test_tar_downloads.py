"""A compressed archive of a stranger takes no more disk and memory than the limit of a download."""

import gzip
import io
import resource
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from harbortrainer.sandbox import tar_downloads
from harbortrainer.sandbox.containers.downloads import TooLargeError
from harbortrainer.sandbox.tar_downloads import unpack_bounded

pytestmark = pytest.mark.process
MB = 1 << 20


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def sparse(name: str, size: int) -> bytes:
    """A sparse file without data."""
    member = tarfile.TarInfo(name)
    member.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[483:495] = b"%011o\0" % size
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


BOMBS: dict[str, Callable[[], list[bytes]]] = {
    "a large file": lambda: [header("big", 64 * MB), bytes(64 * MB)],
    "many files": lambda: [header("a", 3 * MB), bytes(3 * MB), header("b", 3 * MB), bytes(3 * MB)],
    "a sparse file": lambda: [header("small", 0), sparse("hole", 1 << 32)],
    "a long header": lambda: [header("pax", 256 * MB, tarfile.XHDTYPE), *[bytes(64 * MB)] * 4],
    "headers without end": lambda: [header("x", MB // 2, tarfile.GNUTYPE_LONGNAME) + bytes(MB // 2)] * 400,
}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_is_refused_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    (archive := tmp_path / "archive").write_bytes(gzip.compress(b"".join(BOMBS[name]()), 1))
    assert archive.stat().st_size < 2 * MB
    (target := tmp_path / "target").mkdir()
    (target / "earlier").touch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((TooLargeError, tarfile.ReadError), match="exceeds the limit"):
        unpack_bounded(archive, target, 5 * MB)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
    assert [path.name for path in target.iterdir()] == ["earlier"]


def test_more_files_than_allowed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_downloads, "MAX_FILES", 99)
    (archive := tmp_path / "archive").write_bytes(gzip.compress(header("./same", 0) * 100, 1))
    with pytest.raises(TooLargeError, match="exceeds the limit"):
        unpack_bounded(archive, tmp_path, 5 * MB)


def test_honest_files_arrive_and_devices_do_not(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, kind, link in (
            (".", tarfile.DIRTYPE, ""),
            ("./a/run", tarfile.REGTYPE, ""),
            ("./link", tarfile.SYMTYPE, "a/run"),
            ("./pipe", tarfile.FIFOTYPE, ""),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, link, 0o755
            member.size = 5 * MB if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    (archive := tmp_path / "archive").write_bytes(buffer.getvalue())
    (target := tmp_path / "target").mkdir()
    unpack_bounded(archive, target, 5 * MB)
    assert (target / "link").stat().st_size == 5 * MB and (target / "a/run").stat().st_mode & 0o777 == 0o755
    assert not (target / "pipe").exists()
