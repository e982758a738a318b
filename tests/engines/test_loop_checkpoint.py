"""Checkpoints: complete or not there, and which of them stay."""

import pytest

from harbortrainer.config.runfile import CkptConfig
from harbortrainer.engines.local.checkpoint import Progress, kept, latest, prune, save, steps_in


class OneFile:
    """A learner whose state is one file."""

    def save(self, folder):
        (folder / "learner.pt").write_text("state")


class DiskFull:
    """A learner that fails in the middle."""

    def save(self, folder):
        (folder / "half").write_text("")
        raise OSError("disk full")


def test_the_last_step_is_found_with_its_progress(tmp_path):
    for step in (1, 2, 10):
        save(tmp_path, OneFile(), Progress(step=step, train_s=step * 1.5, schedule={"drawn": {"s": 3}, "again": []}))
    found = latest(tmp_path)
    assert found is not None
    assert found[0].name == "step_10"
    assert found[1] == Progress(step=10, train_s=15.0, schedule={"drawn": {"s": 3}, "again": []})


def test_half_a_checkpoint_is_none(tmp_path):
    save(tmp_path, OneFile(), Progress(step=1))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, DiskFull(), Progress(step=2))
    (tmp_path / "step_3").mkdir()
    assert steps_in(tmp_path) == [1]


def test_no_checkpoint_means_a_fresh_start(tmp_path):
    assert latest(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("ckpt", "stays"),
    [
        (None, {7}),
        (CkptConfig(interval=2), {2, 4, 6, 7}),
        (CkptConfig(interval=2, keep_last=1), {6, 7}),
        (CkptConfig(interval=2, keep_last=1, keep_interval=4), {4, 6, 7}),
    ],
)
def test_the_newest_stays_and_what_the_config_asks_for(ckpt, stays):
    assert kept([1, 2, 3, 4, 5, 6, 7], ckpt, max_steps=20) == stays


def test_pruning_removes_the_rest(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, OneFile(), Progress(step=step))
    prune(tmp_path, CkptConfig(interval=2), max_steps=None)
    assert steps_in(tmp_path) == [2, 3]
