"""The lock of a run on its folder: refusal and release."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.runs.folder import RunFolder

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
