"""Checkpoints: atomic writes, damage, and retention."""

import pytest

from harbortrainer.config.runfile import CkptConfig
from harbortrainer.errors import UserError
from harbortrainer.runs.checkpoints import (
    Progress,
    latest,
    prune,
    save,
    set_aside_damaged,
    steps_in,
    steps_to_keep,
    write_file_list,
)


def one_file(folder):
    """Write a learner's state as one file."""
    (folder / "learner.pt").write_text("state")


def disk_full(folder):
    """Fail in the middle of writing."""
    (folder / "half").write_text("")
    raise OSError("disk full")


def test_latest_returns_last_step_and_progress(tmp_path):
    for step in (1, 2, 10):
        save(tmp_path, one_file, Progress(step=step, train_s=step * 1.5, schedule={"drawn": {"s": 3}, "again": []}))
    found = latest(tmp_path)
    assert found is not None
    assert found[0].name == "step_10"
    assert found[1] == Progress(step=10, train_s=15.0, schedule={"drawn": {"s": 3}, "again": []})


def test_unfinished_checkpoint_leaves_no_folder(tmp_path):
    save(tmp_path, one_file, Progress(step=1))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, disk_full, Progress(step=2))
    (tmp_path / "step_03").mkdir()
    (tmp_path / "step_4").write_text("")
    assert steps_in(tmp_path) == [1]


def test_step_folder_without_files_is_named(tmp_path):
    save(tmp_path, one_file, Progress(step=1))
    (tmp_path / "step_3").mkdir()
    assert set_aside_damaged(tmp_path) == [
        "checkpoint step_3 is damaged (files.json is missing): set aside as damaged_step_3"
    ]
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize("name", ["progress.json", "files.json"])
def test_deeply_nested_json_is_damage(name, tmp_path):
    for step in (1, 2):
        save(tmp_path, one_file, Progress(step=step))
    (tmp_path / "step_2" / name).write_text("[" * 100_000)
    if name == "progress.json":
        write_file_list(tmp_path / "step_2")
    assert set_aside_damaged(tmp_path) == [
        f"checkpoint step_2 is damaged ({name} cannot be read): set aside as damaged_step_2"
    ]


def test_latest_is_none_without_checkpoint(tmp_path):
    assert latest(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("ckpt", "stays"),
    [
        (None, {6, 7}),
        (CkptConfig(interval=2), {2, 4, 6, 7}),
        (CkptConfig(interval=2, keep_last=1), {6, 7}),
        (CkptConfig(interval=2, keep_last=1, keep_interval=4), {4, 6, 7}),
        (CkptConfig(interval=3, keep_last=1), {6, 7}),
    ],
)
def test_keeps_newest_two_and_configured_checkpoints(ckpt, stays):
    assert steps_to_keep([1, 2, 3, 4, 5, 6, 7], ckpt, max_steps=20) == stays


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwrite(path):
    path.write_bytes(b"x" * path.stat().st_size)


@pytest.mark.parametrize("damage", [cut, overwrite, lambda path: path.unlink()], ids=["cut", "overwritten", "missing"])
@pytest.mark.parametrize("name", ["progress.json", "learner.pt", "files.json"])
def test_damaged_checkpoint_is_set_aside(name, damage, tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, one_file, Progress(step=step))
    for step in (2, 3):
        damage(tmp_path / f"step_{step}" / name)
    if name == "files.json" and not (tmp_path / "step_3" / name).exists():
        # What a release wrote that made no list.
        assert set_aside_damaged(tmp_path) == []
        return
    lines = set_aside_damaged(tmp_path)
    assert [line.split(":")[1].strip() for line in lines] == [f"set aside as damaged_step_{step}" for step in (3, 2)]
    assert all(name in line for line in lines)
    found = latest(tmp_path)
    assert found is not None
    assert found[1].step == 1
    assert (tmp_path / "damaged_step_3").is_dir()


def test_nothing_changes_if_all_checkpoints_are_damaged(tmp_path):
    save(tmp_path, one_file, Progress(step=1))
    cut(tmp_path / "step_1" / "learner.pt")
    with pytest.raises(
        UserError, match=r"step_1: all checkpoints are damaged \(learner.pt has changed since it was written\)"
    ):
        set_aside_damaged(tmp_path)
    assert steps_in(tmp_path) == [1]


def test_prune_removes_other_checkpoints(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, one_file, Progress(step=step))
    prune(tmp_path, CkptConfig(interval=2), max_steps=None)
    assert steps_in(tmp_path) == [2, 3]
