"""A task's hashes are Harbor's, and follow each change of its files."""

import os
import shutil
import time
from pathlib import Path

import pytest
from harbor.models.job import lock
from harbor.models.task.task import Task
from harbor.publisher.packager import Packager

from harbortrainer.harbor_compat import prepare
from harbortrainer.harbor_compat.task_hashes import TaskHashes, metadata_digest

pytestmark = pytest.mark.process  # importing the lock asks git for a release

SAMPLE = Path(__file__).parents[2] / "datasets" / "harbor_tasks" / "csv-clean"


def settled(folder: Path) -> Path:
    """Wait until the folder's last change is old enough."""
    deadline = time.monotonic() + 10
    while metadata_digest(folder) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert metadata_digest(folder) is not None
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "task"))


def hashes_of(folder: Path) -> tuple[str, str]:
    prepare()
    return Task(folder).checksum, lock.Packager.compute_content_hash(folder)[0]


def test_files_are_read_once_until_one_changes(folder: Path):
    settled(folder)
    hashes, reads = TaskHashes[int](), iter(range(9))
    assert [hashes.get(folder, lambda: next(reads)) for _ in range(3)] == [0, 0, 0]
    test = folder / "tests" / "test.sh"
    status, text = test.stat(), test.read_text()
    test.write_text(text.replace("reward", "drawer"))  # as long as before
    os.utime(test, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert [hashes.get(folder, lambda: next(reads)) for _ in range(2)] == [1, 2]  # the change is recent
    settled(folder)
    assert [hashes.get(folder, lambda: next(reads)) for _ in range(2)] == [3, 3]


def test_hashes_are_harbors_before_and_after_a_change(folder: Path):
    settled(folder)
    before = hashes_of(folder)
    assert before == hashes_of(folder)
    assert before[1] == Packager.compute_content_hash(folder)[0]
    (folder / "solution" / "notes.txt").write_text("changed")
    after = hashes_of(folder)
    assert after[0] != before[0] and after[1] == Packager.compute_content_hash(folder)[0] != before[1]
    assert settled(folder) and hashes_of(folder) == after
    (folder / "solution" / "notes.txt").unlink()
    assert hashes_of(folder) == before


@pytest.mark.parametrize("change", ["mode", "rename", "new folder"])
def test_every_change_counts(folder: Path, change: str):
    before = metadata_digest(settled(folder))
    if change == "mode":
        (folder / "instruction.md").chmod(0o600)
    elif change == "rename":
        (folder / "instruction.md").rename(folder / "INSTRUCTION.md")
    else:
        (folder / "environment" / "empty").mkdir()
    assert metadata_digest(settled(folder)) != before


def test_links_and_missing_folders_are_left_to_harbor(folder: Path):
    settled(folder)
    (folder / "tests" / "link").symlink_to("/etc/hostname")
    os.utime(folder / "tests" / "link", ns=(0, 0), follow_symlinks=False)
    assert metadata_digest(folder) is None
    assert metadata_digest(folder / "nothing") is None
