"""Mistakes in the run file are reported before slow imports, and slow imports are announced."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from project_folder import RUN_FILE, write_project

ROOT = Path(__file__).parents[2]
SLOW = ("harbor", "litellm", "renderers", "torch", "transformers", "verifiers")
CHILD = f"""
import sys
from harbortrainer.cli import main
code = main(sys.argv[1:])
print(*(module for module in {SLOW!r} if module in sys.modules), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def write_run_file(tmp_path, monkeypatch):
    """A folder with a model, a task and an earlier run; returns a function that writes the run file."""
    monkeypatch.chdir(write_project(tmp_path))
    Path("outputs/taken").mkdir(parents=True)
    Path("outputs/taken/config.toml").write_text("seq_len = 1\n")

    def write(tasks: str = "tasks", harness: str = 'environment_type = "local"') -> None:
        text = RUN_FILE.replace('tasks_dir = "tasks"', f'tasks_dir = "{tasks}"')
        Path("run.toml").write_text(text.replace('environment_type = "local"', harness))

    return write


def harbortrainer(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a subprocess. The last line of its stderr names the slow modules that it imported."""
    command = [sys.executable, "-c", CHILD, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `harbortrainer train` on the embedded engine."""
    return harbortrainer("train", "--config", "run.toml", "--engine", "local", *arguments)


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("written", "arguments", "expected"),
    [
        ({"tasks": "none"}, (), "run.toml: orchestrator.train.source[0].env.taskset.tasks_dir: none: no such folder"),
        ({}, ("--model.name", "./none"), "command line: --model.name: no such folder: ./none"),
        ({}, ("--orchestrator.batch-size", "0"), "command line: --orchestrator.batch-size: input should be"),
        (
            {"harness": "n_parallel_envs = 0"},
            (),
            "run.toml: orchestrator.train.source[0].env.agent.harness.n_parallel_envs: input should be",
        ),
        (
            {"harness": 'enviroment_type = "local"'},
            (),
            "run.toml: orchestrator.train.source[0].env.agent.harness.enviroment_type: no such key; did you mean",
        ),
        ({}, ("--run.name", "taken"), "command line: --run.name: "),
        ({}, ("--resume",), "there is no run to resume here"),
    ],
)
def test_run_file_mistakes_are_reported_before_slow_imports(write_run_file, written, arguments, expected, dry_run):
    write_run_file(**written)
    done = train(*arguments, *["--dry-run"] * dry_run)
    error, imported = done.stderr.splitlines()
    assert (done.returncode, imported) == (2, "")
    assert error.startswith("error: ") and expected in error
    assert "loading" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--model", "model", "--tasks", "none"), "command line: --tasks: no such file or folder: none"),
        (("--model", "model", "--tasks", "tasks"), "command line: --tasks: tasks: no task has a solution/solve.sh"),
        (("--model", "model", "--tasks", "model"), "command line: --tasks: model: "),
        (("--model", "tasks", "--tasks", "tasks"), "command line: --model: no config.json in tasks"),
        (
            ("--config", "run.toml", "--warmup.tasks", "none", "--warmup.model", "model"),
            "command line: --warmup.tasks: no such file or folder: none",
        ),
    ],
)
def test_warmup_mistakes_are_reported_before_slow_imports(write_run_file, arguments, expected):
    write_run_file()
    done = harbortrainer("warmup", *arguments)
    *errors, imported = done.stderr.splitlines()
    assert (done.returncode, imported) == (2, "")
    assert any(error.startswith(f"error: {expected}") for error in errors)
    assert "loading" not in done.stdout and not Path("outputs/warmup").exists()


def test_slow_imports_are_announced(write_run_file):
    write_run_file()
    done = train("--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(re.fullmatch(r"loading verifiers and the plugin \.\.\. \d+\.\d s", line) for line in lines), lines
    assert "torch" not in done.stderr and "litellm" not in done.stderr.split()
