"""The tasks of `tools/reasoning_gym_tasks.py`, on which docs/quickstart.md reports a gain. Needs the package index."""

import subprocess
import sys
from pathlib import Path

import pytest

from harbortrainer.entry import main
from harbortrainer.tasks.task_folder import load_folder

pytestmark = [pytest.mark.e2e, pytest.mark.long]
ROOT = Path(__file__).parents[1]
ONE_EACH = "*-03"


def test_one_task_of_each_generator_passes_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tool = ROOT / "tools/reasoning_gym_tasks.py"
    package = tool.read_text(encoding="utf-8").partition("--with ")[2].split()[0]
    command = [ROOT / ".tools/uv", "run", "--no-project", "--with", package, "--python", sys.executable, tool, "tasks"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list(Path("tasks").iterdir())) == 142
    assert len(load_folder("tasks", include=[ONE_EACH])) == done.stdout.count(" of 24 questions") == 6
    check = ["tasks", "check", "tasks", "--include", ONE_EACH, "--environment", "local", "--repeats", "1"]
    assert main(check) == 0
