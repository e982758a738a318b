"""A folder is written atomically, even if the process is killed."""

import signal
import subprocess
import sys

import pytest

from harbortrainer.runs.durable import atomic_folder, recover_folder

WRITER = """
import os, signal, sys
from pathlib import Path
from harbortrainer.runs import durable as folder
path, moment = Path(sys.argv[1]), sys.argv[2]
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
if moment == "before the rename": folder._take_over = die
if moment == "between the renames":
    rename, count = Path.rename, []
    def second_time_die(self, target):
        count.append(1)
        return die() if len(count) == 2 else rename(self, target)
    Path.rename = second_time_die
with folder.atomic_folder(path) as fresh:
    (fresh / "one").write_text("new")
    if moment == "in the middle": die()
    (fresh / "two").write_text("new")
"""


def killed_writer(path, moment):
    result = subprocess.run([sys.executable, "-c", WRITER, str(path), moment], check=False, timeout=60)
    assert result.returncode == -signal.SIGKILL


@pytest.mark.parametrize("moment", ["in the middle", "before the rename"])
def test_kill_leaves_no_partial_folder(tmp_path, moment):
    killed_writer(tmp_path / "step_1", moment)
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == []
    recover_folder(tmp_path / "step_1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["in the middle", "before the rename", "between the renames"])
def test_a_kill_while_replacing_keeps_the_old_folder(tmp_path, moment):
    path = tmp_path / "step_1"
    with atomic_folder(path) as fresh:
        (fresh / "one").write_text("old")
    killed_writer(path, moment)
    recover_folder(path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    assert (path / "one").read_text() == "old"
    assert not (path / "two").exists()


def test_exception_leaves_no_folder(tmp_path):
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "a") as fresh:
        (fresh / "one").write_text("new")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_folder_is_replaced_atomically(tmp_path):
    for name in ("one", "two"):
        with atomic_folder(tmp_path / "a") as fresh:
            (fresh / name).write_text(name)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["two"]
