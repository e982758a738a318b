"""A mistake in the file is told before anything slow is imported, and what is slow to import is named first."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from workplace import RUN_FILE, lay_out

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
def workplace(tmp_path, monkeypatch):
    """A folder with a model, a task and an earlier run; writes the run file."""
    monkeypatch.chdir(lay_out(tmp_path))
    Path("outputs/taken").mkdir(parents=True)
    Path("outputs/taken/config.toml").write_text("seq_len = 1\n")

    def write(tasks: str = "tasks", harness: str = 'environment_type = "local"') -> None:
        text = RUN_FILE.replace('tasks_dir = "tasks"', f'tasks_dir = "{tasks}"')
        Path("run.toml").write_text(text.replace('environment_type = "local"', harness))

    return write


def harbortrainer(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """A command in a process of its own, and the seconds of CPU it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", CHILD, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """`harbortrainer train` on the embedded engine."""
    return harbortrainer("train", "--config", "run.toml", "--engine", "local", *words)


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("written", "words", "told"),
    [
        ({"tasks": "none"}, (), "run.toml: orchestrator.train.source[0].env.taskset.tasks_dir: none: no such folder"),
        ({}, ("--model.name", "./none"), "command line: --model.name: no such folder: ./none"),
        ({}, ("--orchestrator.batch-size", "0"), "command line: --orchestrator.batch-size: input should be"),
        (
            {"harness": "n_parallel_envs = 0"},
            (),
            "run.toml: orchestrator.train.source[0].env.agent.harness.n_parallel_envs: input should be",
        ),
        ({}, ("--run.name", "taken"), "command line: --run.name: "),
        ({}, ("--resume",), "there is no run to resume here"),
    ],
)
def test_a_mistake_in_the_file_is_told_before_anything_slow_is_imported(workplace, written, words, told, dry_run):
    workplace(**written)
    done, cpu_s = train(*words, *["--dry-run"] * dry_run)
    error, imported = done.stderr.splitlines()
    assert (done.returncode, imported) == (2, "")
    assert error.startswith("error: ") and told in error
    assert "loading" not in done.stdout
    assert cpu_s < 4, "a second on a machine that has nothing else to do, twice that beside others, 8 with torch"


@pytest.mark.parametrize(
    ("words", "told"),
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
def test_a_warm_up_of_nothing_that_can_be_learned_is_told_before_anything_slow(workplace, words, told):
    workplace()
    done, cpu_s = harbortrainer("warmup", *words)
    error, imported = done.stderr.splitlines()
    assert (done.returncode, imported) == (2, "")
    assert error.startswith(f"error: {told}")
    assert "loading" not in done.stdout and not Path("outputs/warmup").exists()
    assert cpu_s < 4, "a second on a machine that has nothing else to do, twice that beside others, 8 with torch"


def test_what_is_slow_to_import_is_named_before(workplace):
    workplace()
    done, _ = train("--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "loading verifiers and the plugin ..." in lines
    assert "torch" not in done.stderr and "harbor" not in done.stderr.split()
