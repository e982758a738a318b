"""The folders of failed trials stay under a size limit."""

import asyncio
import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from harbortrainer.runs.durable import read_lines
from harbortrainer.trials.kept_trials import KEPT_FILE, bytes_on_disk, limit_kept
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.runner import _clean_up

MB = 1_000_000


def make_folder(trials: Path, name: str, size: int = 400_000) -> Path:
    (trials / name / "agent").mkdir(parents=True)
    (trials / name / "agent" / "output.txt").write_bytes(b"x" * size)
    return trials / name


def kept(trials: Path) -> list[str]:
    return sorted(path.name for path in trials.iterdir() if path.is_dir())


async def test_oldest_registered_folders_are_removed(tmp_path: Path):
    make_folder(tmp_path, "running", 5 * MB)
    for name in ("d", "c", "b", "a"):
        await limit_kept(make_folder(tmp_path, name), MB)
    assert kept(tmp_path) == ["a", "b", "running"]
    assert [row["trial"] for row in read_lines(tmp_path / KEPT_FILE)] == ["b", "a"]


async def test_retried_start_in_a_registered_folder_stays(tmp_path: Path):
    await limit_kept(make_folder(tmp_path, "again"), MB)
    shutil.rmtree(tmp_path / "again")
    make_folder(tmp_path, "again")
    os.utime(tmp_path / "again", ns=(1, 1))
    for name in ("b", "c", "d"):
        await limit_kept(make_folder(tmp_path, name), MB)
    assert kept(tmp_path) == ["again", "c", "d"]


async def test_trial_without_a_folder_is_not_registered(tmp_path: Path):
    await limit_kept(tmp_path / "none", MB)
    assert not (tmp_path / KEPT_FILE).exists()


async def test_folder_over_the_limit_is_removed(tmp_path: Path):
    await limit_kept(make_folder(tmp_path, "huge", 3 * MB), MB)
    assert kept(tmp_path) == []
    await limit_kept(make_folder(tmp_path, "small"), MB)
    assert kept(tmp_path) == ["small"]


async def test_concurrent_trials_are_all_registered(tmp_path: Path):
    folders = [make_folder(tmp_path, f"t{number:02}", 10_000) for number in range(8)]
    await asyncio.gather(*(limit_kept(folder, 100 * MB) for folder in folders))
    assert sorted(row["trial"] for row in read_lines(tmp_path / KEPT_FILE)) == kept(tmp_path)


def test_links_are_not_followed(tmp_path: Path):
    big = make_folder(tmp_path, "big", 2 * MB)
    folder = make_folder(tmp_path, "small", 4096)
    (folder / "file").symlink_to(big / "agent" / "output.txt")
    (folder / "folder").symlink_to(big)
    assert bytes_on_disk(folder) < 100_000


@pytest.mark.parametrize(
    ("keep", "outcome", "left"),
    [
        ("failed", Outcome.sandbox_error, ["t2", "t3"]),
        ("failed", Outcome.completed, []),
        ("all", Outcome.sandbox_error, 4),
    ],
)
async def test_trial_end_limits_kept_folders(tmp_path: Path, keep, outcome, left):
    spec = SimpleNamespace(trials_dir=tmp_path, keep_trials=keep, keep_trials_mb=1, model=None)
    for number in range(4):
        make_folder(tmp_path, f"t{number}")
        record = SimpleNamespace(outcome=outcome, trial_dir="t")
        await _clean_up(spec, SimpleNamespace(trial_name=f"t{number}"), record)  # ty: ignore[invalid-argument-type]
    assert kept(tmp_path) == left or len(kept(tmp_path)) == left


async def test_failed_trial_keeps_its_outcome_without_locks(tmp_path, monkeypatch, caplog):
    def flock(file: object, kind: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    spec = SimpleNamespace(trials_dir=tmp_path, keep_trials="failed", keep_trials_mb=1, model=None)
    for number in range(4):
        make_folder(tmp_path, f"t{number}")
        record = SimpleNamespace(outcome=Outcome.sandbox_error, trial_dir="t")
        await _clean_up(spec, SimpleNamespace(trial_name=f"t{number}"), record)  # ty: ignore[invalid-argument-type]
    assert kept(tmp_path) == ["t0", "t1", "t2", "t3"]
    (warning,) = caplog.messages
    assert warning.startswith(f"keep_trials_mb has no effect: {tmp_path / '.kept.lock'}: this file system has no file")
