"""The commands of docs/write-a-task.md create two tasks, and `tasks check` prints the output quoted there."""

import re
import subprocess
from pathlib import Path

import pytest

from harbortrainer.cli import main

pytestmark = pytest.mark.e2e

PAGE = (Path(__file__).parents[2] / "docs" / "write-a-task.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run all commands of the page in a new folder, and return it."""
    monkeypatch.chdir(tmp_path)
    for block in BLOCKS:
        subprocess.run(["bash", "-euc", block], check=True)
    return tmp_path


def check(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Check the tasks with the host's root filesystem; return the output without progress lines."""
    main(["tasks", "check", "my-tasks", "--ek", "image=host"])
    return [line for line in capfd.readouterr().out.splitlines() if not line.startswith("checking tasks")]


def test_documented_tasks_pass_the_check(page_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = ["ok   count-errors", "ok   fix-greeting"]
    *verdicts, summary = check(capfd)[-3:]
    # The verdicts are printed in the order in which the checks finish.
    assert (sorted(verdicts), summary) == (expected, "2 of 2 tasks are fit to train on")
    assert "\n".join([*expected, summary]) in PAGE


def test_new_task_passes_the_check_with_all_cheats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tasks", "new", "my-tasks/first"]) == 0
    assert 'name = "me/first"' in Path("my-tasks/first/task.toml").read_text()
    assert check(capfd)[-2:] == ["ok   first", "1 of 1 tasks are fit to train on"]


def test_documented_first_draft_is_weak(page_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (condition,) = re.findall(r"`(if diff <\(.*?\) /app/errors.txt)`", PAGE)
    verifier = page_folder / "my-tasks/count-errors/tests/test.sh"
    verifier.write_text(f"#!/bin/bash\n{condition}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n")
    output = check(capfd)
    assert "WEAK count-errors  a reward without a solution: replaced-tools (1)" in output
    assert "`WEAK count-errors  a reward without a solution: replaced-tools (1)`" in PAGE
