"""Unpacking a saved image's layer for an overlay, and archives that try to write outside its folder."""

import gzip
import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from harbortrainer.sandbox.errors_and_changes import SandboxBuildError
from harbortrainer.sandbox.images.layer_archive import unpack

OPAQUE_ATTRIBUTES = {True: "trusted.overlay.opaque", False: "user.overlay.opaque"}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can set trusted.* attributes")
with_and_without_privileges = pytest.mark.parametrize(
    "privileged",
    [pytest.param(True, marks=needs_root), False],
)


def entry(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **fields: object) -> tuple:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.mode = kind, len(content), 0o755 if kind == tarfile.DIRTYPE else 0o644
    for field, value in fields.items():
        setattr(member, field, value)
    return member, content


def layer(*entries: tuple) -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in entries:
            tar.addfile(member, io.BytesIO(content))
    file.seek(0)
    return file


def folder(name: str, **fields: object) -> tuple:
    return entry(name, tarfile.DIRTYPE, b"", **fields)


def link(name: str, to: str) -> tuple:
    return entry(name, tarfile.SYMTYPE, linkname=to)


def names_in(path: Path) -> list[str]:
    return sorted(child.name for child in path.iterdir())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """An empty folder next to a file that must not change."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("untouched")
    (tmp_path / "layer").mkdir()
    return tmp_path / "layer"


def assert_outside_unchanged(target: Path) -> None:
    outside = target.parent / "outside"
    assert names_in(target.parent) == ["layer", "outside"]
    assert names_in(outside) == ["file"]
    assert (outside / "file").read_text() == "untouched"
    assert (outside / "file").stat().st_nlink == 1
    assert not os.listxattr(outside)
    assert not os.listxattr(target.parent)


@with_and_without_privileges
def test_unpacks_every_entry_type(target, privileged):
    big = b"x" * 70_000
    size = unpack(
        layer(
            folder("./"),
            folder("d", mode=0o750, mtime=1_000),
            entry("d/file", content=b"one", mode=0o4755, uid=12, gid=34, mtime=2_000),
            entry("d/other", tarfile.LNKTYPE, linkname="d/file"),
            link("d/link", "/etc/passwd"),
            entry("deep/below/nothing", content=big),
            entry("pipe", tarfile.FIFOTYPE),
            entry("disk", tarfile.BLKTYPE, devmajor=8),
            folder("closed", mode=0o555),
            entry("closed/file", content=b"two"),
        ),
        target,
        privileged=privileged,
    )
    file = (target / "d/file").stat()
    assert size == 3 + len(big) + 3
    assert (stat.S_IMODE(file.st_mode), file.st_mtime, file.st_nlink) == (0o4755, 2_000, 2)
    assert (file.st_uid, file.st_gid) == ((12, 34) if privileged else (os.geteuid(), os.getegid()))
    assert (target / "d/other").samefile(target / "d/file")
    assert (target / "d/link").readlink() == Path("/etc/passwd")
    assert (target / "d").stat().st_mtime == 1_000
    assert (stat.S_IMODE((target / "d").stat().st_mode), stat.S_IMODE((target / "deep").stat().st_mode)) == (
        0o750,
        0o755,
    )
    assert (target / "deep/below/nothing").read_bytes() == big
    assert (target / "pipe").is_fifo()
    assert not (target / "disk").exists()
    assert stat.S_IMODE((target / "closed").stat().st_mode) == (0o555 if privileged else 0o755)


@with_and_without_privileges
def test_archive_whiteouts_become_overlay_whiteouts(target, privileged):
    unpack(
        layer(
            folder("d"),
            entry("d/.wh.removed"),
            entry("hides/.wh..wh..opq"),
            entry("hides/new", content=b"n"),
            entry(".wh.anew"),
            folder("anew"),
            entry(".wh.file"),
            entry("file", content=b"again"),
            entry("d/.wh..wh.plnk"),
        ),
        target,
        privileged=privileged,
    )
    whiteout = (target / "d/removed").lstat()
    assert stat.S_ISCHR(whiteout.st_mode)
    assert whiteout.st_rdev == os.makedev(0, 0)
    assert names_in(target / "d") == ["removed"]
    for name in ("hides", "anew"):
        assert os.getxattr(target / name, OPAQUE_ATTRIBUTES[privileged]) == b"y"
    assert (target / "file").read_text() == "again"
    assert names_in(target) == ["anew", "d", "file", "hides"]


def test_reads_compressed_layer_and_refuses_other_files(target):
    unpack(io.BytesIO(gzip.compress(layer(entry("a", content=b"1")).read())), target, privileged=False)
    assert (target / "a").read_text() == "1"
    with pytest.raises(SandboxBuildError, match="a layer of the image cannot be unpacked"):
        unpack(io.BytesIO(b"\x28\xb5\x2f\xfd" + b"0" * 600), target, privileged=False)


@pytest.mark.parametrize(
    "entries",
    [
        [entry("../outside/file", content=b"x")],
        [entry("a/../../outside/new", content=b"x")],
        [entry("copy", tarfile.LNKTYPE, linkname="../outside/file")],
        [entry(".wh...")],
        [entry("d/.wh...")],
        [link("a", "b"), link("b", "a"), entry("a/file", content=b"x")],
        [folder("full"), entry("full/file"), link("full", "/")],
        [entry("copy", tarfile.LNKTYPE, linkname="nothing")],
    ],
)
@with_and_without_privileges
def test_refuses_archive_that_points_outside_or_nowhere(target, privileged, entries):
    with pytest.raises(SandboxBuildError):
        unpack(layer(*entries), target, privileged=privileged)
    assert_outside_unchanged(target)


@with_and_without_privileges
def test_links_are_resolved_with_folder_as_root(target, privileged):
    out = str(target.parent / "outside")
    unpack(
        layer(
            entry("/etc/absolute", content=b"a"),
            link("up", "../../../../outside"),
            entry("up/file", content=b"b"),
            link("out", out),
            entry("out/file", content=b"c"),
            entry("out/.wh.file2"),
            entry("out/.wh..wh..opq"),
            folder("out/sub", mode=0o777),
            entry("copy", tarfile.LNKTYPE, linkname="out/file"),
            link("last", f"{out}/file"),
            entry("last", content=b"d"),
            folder("swapped", mode=0o700),
            entry("swapped/.wh.file3"),
            entry("swapped/.wh..wh..opq"),
            link("swapped", out),
        ),
        target,
        privileged=privileged,
    )
    assert_outside_unchanged(target)
    assert (target / "etc/absolute").read_text() == "a"
    assert (target / "outside/file").read_text() == "b"
    inside = target / out.lstrip("/")
    assert (inside / "file").read_text() == "c"
    assert (target / "copy").samefile(inside / "file")
    assert (target / "last").read_text() == "d"
    assert not (target / "last").is_symlink()
    assert stat.S_ISCHR((inside / "file3").lstat().st_mode)
