"""Untrusted archives cannot read or write outside their task's folder, or fill the disk."""

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from harbortrainer.errors import UserError
from harbortrainer.tasks.task_archive import drop_links_above_tasks, inspect_tree, unpack_task

KIB = 1024


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, link, mode
    return member


def test_archive_round_trip_keeps_folder(tmp_path: Path) -> None:
    good = packed(
        (entry("task.toml"), b'version = "1.0"\n'),
        (entry("tests/", tarfile.DIRTYPE), b""),
        (entry("tests/test.sh", mode=0o755), b"true\n"),
        (entry("tests/alias", tarfile.SYMTYPE, "test.sh"), b""),
    )
    for number, archive in enumerate((good, gzip.decompress(good))):
        folder = tmp_path / str(number)
        unpack_task(archive, folder)
        assert (folder / "task.toml").read_text() == 'version = "1.0"\n'
        assert os.access(folder / "tests/test.sh", os.X_OK) and not os.access(folder / "task.toml", os.X_OK)
        assert (folder / "tests/alias").readlink() == Path("test.sh")


HOSTILE: dict[str, Callable[[], bytes]] = {
    "above": lambda: packed((entry("../out"), b"x")),
    "deep above": lambda: packed((entry("a/../../out"), b"x")),
    "link to a file of the host's": lambda: packed((entry("a", tarfile.SYMTYPE, "/etc/passwd"), b"")),
    "link that leads above": lambda: packed((entry("a", tarfile.SYMTYPE, "../../out"), b"")),
    "link to its folder's parent, and a file through it": lambda: packed(
        (entry("a", tarfile.SYMTYPE, ".."), b""), (entry("a/out"), b"x")
    ),
    "hard link to a file of the host's": lambda: packed((entry("a", tarfile.LNKTYPE, "/etc/passwd"), b"")),
    "device": lambda: packed((entry("a", tarfile.CHRTYPE), b"")),
    "pipe": lambda: packed((entry("a", tarfile.FIFOTYPE), b"")),
    "no archive": lambda: b"no archive",
    "nothing": lambda: b"",
    "gzip of nothing": lambda: gzip.compress(b"x" * 2000),
    "cut": lambda: packed((entry("a"), os.urandom(8 * KIB)))[: 4 * KIB],
    "damaged": lambda: (good := packed((entry("a"), os.urandom(8 * KIB))))[:3000] + b"\0" * 500 + good[3500:],
    "a file upon a file": lambda: packed((entry("a"), b"x"), (entry("a/b"), b"x")),
    "a name that is too long": lambda: packed((entry("n" * 5000), b"x")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_refuses_hostile_or_broken_archive(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "set" / "task"
    with pytest.raises(UserError) as caught:
        unpack_task(HOSTILE[name](), folder)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() and not (tmp_path / "set" / "out").exists()


def test_absolute_path_is_unpacked_inside_folder(tmp_path: Path) -> None:
    unpack_task(packed((entry("/etc/task"), b"x")), tmp_path / "task")
    assert (tmp_path / "task/etc/task").read_bytes() == b"x"


def claimed(size: int, kind: bytes) -> bytes:
    """Pack an entry of `size` zero bytes without holding them in memory."""
    member = entry("a", kind)
    member.size = size
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1) as file:
        file.write(member.tobuf())
        for _ in range(size // (64 * KIB)):
            file.write(b"\0" * 64 * KIB)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_refuses_archive_bomb(kind: bytes, tmp_path: Path) -> None:
    archive = claimed(32 << 20, kind)
    assert len(archive) < 1 << 20
    with pytest.raises(UserError, match=r"unpacked size exceeds|more than"):
        unpack_task(archive, tmp_path / "task", max_bytes=8 << 20, max_files=100)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 32 << 20


def test_refuses_archive_with_too_many_entries(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="more than 10"):
        unpack_task(packed(*[(entry(f"f{number}"), b"") for number in range(11)]), tmp_path / "task", max_files=10)


def test_refuses_unsafe_or_oversized_tree(tmp_path: Path) -> None:
    task = tmp_path / "task"
    task.mkdir()
    (task / "file").write_text("x" * 100)
    (task / "alias").symlink_to("file")
    inspect_tree(task)
    with pytest.raises(UserError, match="more than"):
        inspect_tree(task, max_bytes=10)
    with pytest.raises(UserError, match="more than"):
        inspect_tree(task, max_files=1)
    (task / "out").symlink_to("../elsewhere")
    with pytest.raises(UserError, match="the link out leads out of the task"):
        inspect_tree(task)
    (task / "out").unlink()
    os.mkfifo(task / "pipe")
    with pytest.raises(UserError, match="a device or a pipe"):
        inspect_tree(task)


def test_removes_links_outside_tasks_only(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task/task.toml").write_text("")
    (tmp_path / "task/alias").symlink_to("task.toml")
    (tmp_path / "all").symlink_to("/")
    drop_links_above_tasks(tmp_path)
    assert not (tmp_path / "all").is_symlink() and (tmp_path / "task/alias").is_symlink()
