"""A full disk or a removed run folder: a one-line error, and finished steps are kept."""

import asyncio
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from patience import wait_until
from scripted_run import FakeComponents, ScriptedRun

from harbortrainer.errors import RunStoppedError
from harbortrainer.runs.checkpoints import latest, rewind, set_aside_damaged, steps_in
from harbortrainer.runs.disk_faults import disk_faults
from harbortrainer.runs.locks import RunLock

MB = 1 << 20


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def train(run: ScriptedRun) -> None:
    """Train with disk errors reported as user errors."""
    with disk_faults(run.folder.path):
        asyncio.run(run.train())


class LargeCheckpoints(FakeComponents):
    """A learner with checkpoints of `size` bytes; `before_save` is called before step `at` is saved."""

    def __init__(self, size: int, at: int, before_save) -> None:
        super().__init__()
        self.size, self.at, self.before_save = size, at, before_save

    def save(self, folder: Path) -> None:
        if self.version == self.at:
            self.before_save(folder)
        (folder / "adapter_model.safetensors").write_bytes(os.urandom(self.size))


def steps(run: ScriptedRun) -> list[int]:
    return [json.loads(line)["step"] for line in run.folder.metrics_file.read_text().splitlines()]


def test_full_disk_is_one_line_and_loses_one_step(small_disk):
    run = ScriptedRun(small_disk, steps=4)
    filler = small_disk / "filler"
    run.components = LargeCheckpoints(
        MB, 3, lambda folder: filler.write_bytes(bytes(shutil.disk_usage(folder).free - MB // 2))
    )
    with pytest.raises(
        RunStoppedError, match=rf"the disk of {run.folder.path} is full .*; free disk space and continue with --resume"
    ):
        train(run)
    assert set_aside_damaged(run.folder.checkpoints) == []
    found = latest(run.folder.checkpoints)
    assert found is not None
    assert found[1].step == 2
    assert not list(run.folder.checkpoints.glob(".*"))
    # The disk is still full, and this rewind needs no space.
    rewind(run.folder, 1)
    filler.unlink()
    rewind(run.folder, 1)
    assert steps(run) == [1]


def test_full_disk_leaves_whole_metric_lines(small_disk):
    run = ScriptedRun(small_disk, steps=4)
    run.components = LargeCheckpoints(1000, 2, lambda folder: None)
    run.components.train = fill_disk_in_second_step(run.components.train, small_disk)
    with pytest.raises(RunStoppedError, match="is full"):
        train(run)
    (small_disk / "filler").unlink()
    rewind(run.folder, 1)
    assert steps(run) == [1]


def fill_disk_in_second_step(train_step, disk: Path):
    def fill_disk(samples, rescored=()):
        metrics = train_step(samples, rescored)
        if (disk / "small" / "metrics.jsonl").exists():
            with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
                while True:
                    file.write(bytes(4096))
        return metrics

    return fill_disk


def test_deleted_folder_is_one_line(tmp_path):
    run = ScriptedRun(tmp_path, steps=4)
    run.folder.lock = RunLock(run.folder.path)
    # A rename is atomic; a trial that ends during a deletion would write new files.
    run.components = LargeCheckpoints(1000, 2, lambda folder: run.folder.path.rename(tmp_path / "gone"))
    with pytest.raises(RunStoppedError, match=f"the run folder {run.folder.path} was removed or moved during the run"):
        train(run)


def test_folder_deleted_between_steps_is_not_recreated(tmp_path):
    run = ScriptedRun(tmp_path, steps=4)
    run.folder.lock = RunLock(run.folder.path)
    train_step = run.components.train

    def delete_folder_first(samples, rescored=()):
        if run.components.version == 1:
            # A rename, as above.
            run.folder.path.rename(tmp_path / "gone")
        return train_step(samples, rescored)

    run.components.train = delete_folder_first
    with pytest.raises(RunStoppedError, match="was removed or moved during the run"):
        train(run)
    assert not run.folder.path.exists()


def test_other_errors_are_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError), disk_faults(tmp_path / "run"):
        (tmp_path / "elsewhere").read_text()


async def test_run_that_is_cancelled_while_it_writes_a_step_counts_it(tmp_path, monkeypatch):
    """The thread that writes goes on, so `--resume` continues after this step."""
    run = ScriptedRun(tmp_path, steps=3)
    real, writing = run.components.save, threading.Event()

    def slow_save(folder):
        writing.set()
        time.sleep(0.5)
        real(folder)

    monkeypatch.setattr(run.components, "save", slow_save)
    loop = run.loop()
    training = asyncio.create_task(loop.run_remaining_steps())
    await asyncio.to_thread(writing.wait)
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: loop.progress.step == 1)
    assert steps_in(run.folder.checkpoints) == [1]
