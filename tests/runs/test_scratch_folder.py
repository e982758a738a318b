"""Temporary folders of killed processes are removed, and no others."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harbortrainer.runs.scratch_folder import scratch_folder

pytestmark = pytest.mark.process

SCRATCH = """
import time
from harbortrainer.runs.scratch_folder import scratch_folder
with scratch_folder("check") as folder:
    (folder / "trial").mkdir()
    print(folder, flush=True)
    time.sleep(600)
"""


def test_scratch_folders_of_killed_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    unmarked = tmp_path / "harbortrainer-check-older"
    unmarked.mkdir()
    with subprocess.Popen([sys.executable, "-c", SCRATCH], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        try:
            with scratch_folder("check"):
                assert (left / "trial").is_dir(), "its process lives"
        finally:
            process.kill()
    assert left.is_dir()
    with scratch_folder("rollout"):
        assert left.is_dir(), "another command's"
    with scratch_folder("check") as own:
        assert sorted(tmp_path.iterdir()) == sorted([own, unmarked])
    assert list(tmp_path.iterdir()) == [unmarked]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's folder")
def test_scratch_folder_of_another_user_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    foreign = tmp_path / "harbortrainer-check-foreign"
    with scratch_folder("check") as own:
        shutil.copytree(own, foreign)
    os.chown(foreign, 1234, 1234)
    with scratch_folder("check"):
        assert foreign.is_dir()
    os.chown(foreign, 0, 0)
    with scratch_folder("check"):
        assert not foreign.exists()
