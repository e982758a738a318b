"""The commands and the script of docs/write-a-task.md create tasks; `tasks check` prints the output quoted there."""

import json
import re
import subprocess
import sys
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


@pytest.fixture
def benchmark_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the page's script on the page's questions in a new folder, and return it."""
    monkeypatch.chdir(tmp_path)
    for language, file in (("json", "questions.jsonl"), ("python", "to_tasks.py")):
        (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
        Path(file).write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "to_tasks.py", "questions.jsonl", "benchmark"], check=True)
    return tmp_path


def check(capfd: pytest.CaptureFixture[str], folder: str = "my-tasks", *options: str) -> list[str]:
    """Check the tasks with the host's root filesystem; return the output without progress and newer Harbor's `lint`."""
    main(["tasks", "check", folder, "--ek", "image=host", *options])
    return [line for line in capfd.readouterr().out.splitlines() if not line.startswith(("checking tasks", "lint "))]


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


def test_documented_script_turns_a_benchmark_into_trainable_tasks(
    benchmark_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [f"{operation}-{number}" for operation in ("errors", "script") for number in (1, 2, 3)]
    expected = [*(f"ok   {name}" for name in names), "6 of 6 tasks are fit to train on"]
    assert sorted(check(capfd, "benchmark", "--repeats", "1", "--cheats", "none")) == sorted(expected)
    assert "\n".join(expected) in PAGE


@pytest.mark.parametrize(
    ("written", "reward"),
    [("echo ' Twelve ' >", 1), ("printf 12 >", 1), ("echo 13 >", 0), ("echo '*' >", 0), ("mkdir", 0)],
)
def test_documented_script_grades_each_answer(benchmark_folder: Path, written: str, reward: int) -> None:
    task = benchmark_folder / "benchmark/errors-1"
    (task / "solution/solve.sh").write_text(f"#!/bin/bash\n{written} /app/answer.txt\n")
    main(["eval", str(task), "--agent", "oracle", "--ek", "image=host", "--out", "evals"])
    (row,) = (json.loads(line) for line in Path("evals/trials.jsonl").read_text().splitlines())
    assert (row["outcome"], row["reward"]) == ("completed", reward)
