"""One run, one folder: who is refused, and what frees the folder again."""

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
    """Another process that is at work in the run folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), CONFIG], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_is_refused_and_told_who_is_there(resume, holder, tmp_path):
    said = re.compile(
        rf"run: another run is writing into this folder: process {holder.pid} on \S+, since 20\S+ \S+ UTC"
    )
    for open_it in (RunFolder.create, RunFolder.checked):
        with pytest.raises(UserError, match=said) as refused:
            open_it(tmp_path, "run", config_text=CONFIG, resume=resume)
        assert "\n" not in str(refused.value)


def test_a_killed_run_leaves_the_folder_to_the_next(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert RunFolder.create(tmp_path, "run", config_text=CONFIG, resume=True).lock is not None


def test_a_child_that_outlives_the_run_does_not_keep_the_folder(tmp_path):
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
def test_a_folder_that_was_removed_is_noticed_also_when_there_is_another(anew, tmp_path):
    run = RunFolder.create(tmp_path, "run", config_text=CONFIG)
    run.need()
    shutil.rmtree(run.path)
    if anew:
        RunFolder.create(tmp_path, "run", config_text=CONFIG).release()
    with pytest.raises(RunStoppedError, match="was removed or moved away while the run was going"):
        run.need()
