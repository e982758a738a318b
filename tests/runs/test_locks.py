"""The lock of a run on its folder: refusal and release."""

import asyncio
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.locks import NoLocksError, file_lock, try_lock, waiting_lock

CONFIG = "max_steps = 3\n"
HOLD = """
import sys, time
from pathlib import Path
from harbortrainer.runs.folder import RunFolder
run = RunFolder.create(Path(sys.argv[1]), "run", config_text=sys.argv[2])
print("here", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the run folder's lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), CONFIG], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("resume", [False, True])
def test_second_run_is_refused_with_holder(resume, holder, tmp_path):
    said = re.compile(rf"run: another run is using this folder: process {holder.pid} on \S+, since 20\S+ \S+ UTC")
    for open_it in (RunFolder.create, RunFolder.checked):
        with pytest.raises(UserError, match=said) as refused:
            open_it(tmp_path, "run", config_text=CONFIG, resume=resume)
        assert "\n" not in str(refused.value)


def test_killed_run_releases_folder(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert RunFolder.create(tmp_path, "run", config_text=CONFIG, resume=True).lock is not None


def test_surviving_child_does_not_hold_lock(tmp_path):
    run = RunFolder.create(tmp_path, "run", config_text=CONFIG)
    child = subprocess.Popen(["sleep", "60"])
    run.release()
    try:
        again = RunFolder.create(tmp_path, "run", config_text=CONFIG, resume=True)
        assert again.lock is not None
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("anew", [False, True])
def test_detects_removed_or_replaced_folder(anew, tmp_path):
    run = RunFolder.create(tmp_path, "run", config_text=CONFIG)
    run.check_present()
    shutil.rmtree(run.path)
    if anew:
        RunFolder.create(tmp_path, "run", config_text=CONFIG).release()
    with pytest.raises(RunStoppedError, match="was removed or moved during the run"):
        run.check_present()


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def without_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""

    def flock(file: object, kind: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("without_locks")
def test_missing_locks_are_named_with_file_and_remedy(tmp_path: Path):
    async def hold() -> None:
        async with file_lock(tmp_path / "a.lock"):
            pass

    said = re.escape(f"{tmp_path / 'a.lock'}: this file system has no file locks; choose an output folder on another")
    with pytest.raises(NoLocksError, match=said):
        asyncio.run(hold())
    with pytest.raises(NoLocksError, match=said), waiting_lock(tmp_path / "a.lock"):
        pass


@pytest.mark.usefixtures("without_locks")
def test_run_on_file_system_without_locks_has_none(tmp_path: Path):
    run = RunFolder.create(tmp_path, "run", config_text=CONFIG)
    RunFolder.checked(tmp_path, "run", config_text=CONFIG, resume=True)
    assert run.lock is not None and run.lock.is_held


def test_other_errors_of_a_lock_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def flock(file: object, kind: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (tmp_path / "a.lock").open("a") as file, pytest.raises(OSError, match="Input/output error"):
        try_lock(file)
