"""Crafted archives write nothing outside their folder, on any Python; honest ones keep their links and modes.

The attacks are those of CVE-2025-4517, CVE-2025-4330 and CVE-2025-4138, and a file that takes the place of a link.
"""

import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tar_attacks import Member, packed, unresolvable_path

from harbortrainer.errors import UserError
from harbortrainer.sandbox import archives
from harbortrainer.tar_filter import strict_filter
from harbortrainer.tasks.task_archive import unpack_task

pytestmark = pytest.mark.process
OUTSIDE = Path("outside", "file")

ATTACKS: dict[str, Callable[[], list[Member]]] = {
    "an unresolvable path": lambda: unresolvable_path("../outside"),
    "a hard link to a link that was refused": lambda: [
        ("a", tarfile.SYMTYPE, "../outside/file"),
        ("b", tarfile.LNKTYPE, "a"),
        ("b", tarfile.REGTYPE, "written"),
    ],
    "a hard link that takes a link elsewhere": lambda: [
        ("a/b", tarfile.DIRTYPE, ""),
        ("a/b/link", tarfile.SYMTYPE, "../../outside"),
        ("link", tarfile.LNKTYPE, "a/b/link"),
        ("link/file", tarfile.REGTYPE, "written"),
    ],
    "a link that later leads elsewhere": lambda: [
        ("deep", tarfile.DIRTYPE, ""),
        ("link", tarfile.SYMTYPE, "deep/down/../../outside"),
        ("deep/down", tarfile.SYMTYPE, "."),
        ("link/file", tarfile.REGTYPE, "written"),
    ],
    "a file in place of a link": lambda: [
        ("a", tarfile.DIRTYPE, ""),
        ("link", tarfile.SYMTYPE, "a/b/../../outside/file"),
        ("a/b", tarfile.SYMTYPE, "."),
        ("link", tarfile.REGTYPE, "written"),
    ],
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / OUTSIDE).parent.mkdir()
    (tmp_path / OUTSIDE).write_text("before")
    return tmp_path


def assert_untouched(folder: Path) -> None:
    assert (folder / OUTSIDE).read_text() == "before"
    assert [path.name for path in (folder / "outside").iterdir()] == ["file"]
    links = [path for path in (folder / "task").rglob("*") if len(str(path)) < 4000 and path.is_symlink()]
    assert not [path for path in links if not path.resolve().is_relative_to(folder / "task")]


@pytest.mark.parametrize("name", ATTACKS)
def test_download_from_sandbox_stays_in_its_folder(outside: Path, name: str) -> None:
    archives.unpack(packed(ATTACKS[name]()), outside / "task")
    assert_untouched(outside)


@pytest.mark.parametrize("name", ATTACKS)
def test_task_archive_stays_in_its_folder(outside: Path, name: str) -> None:
    (outside / "task").mkdir()
    with pytest.raises(UserError, match="not a valid task archive"):
        unpack_task(packed(ATTACKS[name]()).getvalue(), outside / "task")
    assert_untouched(outside)


def test_harbor_extracts_packages_with_this_filter(outside: Path) -> None:
    code = (
        "import sys, tarfile, harbortrainer.harbor_compat.task_downloads\n"
        "tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='data')"
    )
    for number, attack in enumerate(ATTACKS.values()):
        (archive := outside / f"{number}.tar").write_bytes(packed(attack()).getvalue())
        done = subprocess.run(
            [sys.executable, "-c", code, archive, outside / "task"], capture_output=True, text=True, check=False
        )
        assert "UnsafeMemberError" in done.stderr or "tarfile.LinkOutside" in done.stderr, done.stderr
    assert_untouched(outside)


def test_honest_members_arrive_as_they_are(tmp_path: Path) -> None:
    members: list[Member] = [
        (".", tarfile.DIRTYPE, ""),
        ("./a/b", tarfile.DIRTYPE, ""),
        ("./a/run", tarfile.REGTYPE, "echo"),
        ("./a/b/link", tarfile.SYMTYPE, "../run"),
        ("./same", tarfile.LNKTYPE, "./a/run"),
        ("./a/b/same-link", tarfile.LNKTYPE, "./a/b/link"),
        ("./folder", tarfile.SYMTYPE, "a/b/"),
        ("/rooted", tarfile.REGTYPE, "x"),
        ("./a/run", tarfile.REGTYPE, "twice"),
    ]
    with tarfile.open(fileobj=packed(members)) as tar:
        tar.extractall(tmp_path, filter=strict_filter)
    assert (tmp_path / "a/b/link").readlink() == Path("../run") and (tmp_path / "a/b/link").read_text() == "twice"
    assert (tmp_path / "a/b/same-link").readlink() == Path("../run")
    assert (tmp_path / "same").samefile(tmp_path / "a/run") and (tmp_path / "a/run").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "folder").readlink() == Path("a/b") and (tmp_path / "rooted").read_text() == "x"
