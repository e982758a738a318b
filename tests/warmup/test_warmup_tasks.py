"""Selection of the tasks that a warm-up replays, and what it takes from the run."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from harbortrainer.commands.new_task import new_task
from harbortrainer.config.agent_table import PLAIN_AGENT
from harbortrainer.config.orchestrator_config import APPENDING_TEMPLATE
from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.config.reader import load
from harbortrainer.config.run_sections import WarmupConfig
from harbortrainer.errors import UserError
from harbortrainer.tasks.task_folder import load_folder, load_task
from harbortrainer.tasks.task_selection import select_tasks
from harbortrainer.trials.plain_format import command_of
from harbortrainer.warmup.replay import answers_of, quoted_script, replay
from harbortrainer.warmup.tasks_with_solution import tasks_with_solution
from harbortrainer.warmup.warmup import Rollouts, rollouts_of, warm_up

SAMPLES = Path(__file__).parents[2] / "datasets/harbor_tasks"


def test_multi_step_task_is_skipped_and_named(tmp_path):
    for name in ("incident-two-steps", "csv-clean"):
        (tmp_path / name).symlink_to(SAMPLES / name)
    lines: list[str] = []
    assert [task.name for task in tasks_with_solution(tmp_path, lines.append)] == ["csv-clean"]
    assert lines == ["warm-up: skipping tasks without solution/solve.sh: incident-two-steps"]


def test_unreadable_and_duplicate_tasks_are_skipped_and_named(tmp_path):
    (tmp_path / "csv-clean").symlink_to(SAMPLES / "csv-clean")
    shutil.copytree(SAMPLES / "csv-clean", tmp_path / "same")
    for number in range(4):
        (tmp_path / f"broken-{number}").mkdir()
        (tmp_path / f"broken-{number}/task.toml").write_text("= 1")
    lines: list[str] = []
    assert [task.name for task in tasks_with_solution(tmp_path, lines.append)] == ["csv-clean"]
    (line,) = lines
    assert line.startswith("warm-up: skipping unreadable and duplicate tasks: ") and line.endswith(" and 2 more")
    assert "broken-0/task.toml" in line


def test_only_multi_step_tasks_are_refused_before_model_load(tmp_path: Path):
    config = WarmupConfig(model="no/such-model", tasks=SAMPLES / "incident-two-steps")
    with pytest.raises(UserError, match=r"no task has a solution/solve\.sh"):
        warm_up(config, tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []


def test_replayed_solution_keeps_the_lines_of_scripts_that_it_writes() -> None:
    script = "#!/usr/bin/env python3\nset -x = 1\n"
    written = f"cat > tool <<'END'\n{script}END\ncat <<< word\nchmod +x tool"
    (first, *_) = answers_of(f"#!/bin/bash\nset -e\n{written}\nset +e\nset -x\n./tool")
    assert json.loads(first)["commands"][0]["keystrokes"] == f"{written}\nset +e\n./tool\n"


async def test_plain_agent_learns_a_solution_of_several_lines(tmp_path: Path) -> None:
    new_task(tmp_path / "task")
    script = "#!/bin/bash\n# Counted by hand\nset -e\ncat > /app/errors.txt <<'EOF'\nbilling 2\nsearch 1\nEOF\n"
    (tmp_path / "task/solution/solve.sh").write_text(script)
    (found,) = await replay(
        [load_task(tmp_path / "task")],
        environment_type="local",
        environment_kwargs={"image": "host"},
        agent=PLAIN_AGENT,
        work_dir=tmp_path,
    )
    command = r"bash -c $'cat > /app/errors.txt <<\'EOF\'\nbilling 2\nsearch 1\nEOF'"
    assert [reply for _, reply in found] == [command]


def test_quoted_script_is_one_command_with_the_same_effect() -> None:
    script = (
        "for word in \"it's\" 'a\\nb' '`date`'; do\n\tprintf '%s\\n' \"$word\"\ndone\ncat <<E\na\x0cb\u2028c\x85d\nE"
    )
    command = quoted_script(f"#!/bin/bash\n\n# First\nset -eu\n{script}\n")
    assert command_of(command) == command
    runs = (subprocess.run(["bash", "-c", text], check=True, capture_output=True) for text in (script, command))
    first, second = (run.stdout for run in runs)
    assert first == second and first.startswith(b"it's\na\\nb\n`date`\n")


async def test_solution_that_is_not_text_is_reported(tmp_path: Path) -> None:
    task = shutil.copytree(SAMPLES / "csv-clean", tmp_path / "task")
    with (task / "solution/solve.sh").open("ab") as file:
        file.write(b"# caf\xe9\n")
    reported: list[bool] = []
    settings = {"image": "host"}
    found = await replay(
        [load_task(task)],
        environment_type="local",
        environment_kwargs=settings,
        work_dir=tmp_path,
        report=lambda task, solved: reported.append(solved),
    )
    assert found == [] and reported == [False]


def test_learns_the_training_side_of_a_split_by_default(tmp_path: Path) -> None:
    text = (SAMPLES.parents[1] / "configs/laptop.toml").read_text()
    text = text.replace('tasks = "outputs/demo/tasks/train"\n', "", 1)
    for side, folder in (("train", "outputs/demo/tasks/train"), ("eval", "outputs/demo/tasks/heldout")):
        text = text.replace(f'tasks_dir = "{folder}"', f'tasks_dir = "{SAMPLES}", split = "{side}"')
    (tmp_path / "run.toml").write_text(text)
    taught = rollouts_of(load(tmp_path / "run.toml")).training_tasks
    side = select_tasks(TasksetKeys(id="harbor_env", tasks_dir=SAMPLES, split="train")).tasks
    assert 0 < len(taught) < len(load_folder(SAMPLES))
    assert sorted(task.name for task in taught) == [task.name for task in side]


def test_training_tasks_without_a_solution_are_refused(tmp_path: Path) -> None:
    config = WarmupConfig(model="no/such-model")
    run = Rollouts(training_tasks=load_folder(SAMPLES / "incident-two-steps"))
    with pytest.raises(UserError, match=r"the training tasks: no task has a solution/solve\.sh"):
        warm_up(config, tmp_path / "policy", rollouts=run)


def test_answers_are_as_in_the_run() -> None:
    words = ["--orchestrator.train.sampling.temperature", "0.6"]
    run = load(Path(__file__).parents[2] / "configs" / "laptop.toml", words)
    expected = Rollouts(APPENDING_TEMPLATE, max_length=256, answer_length=24, temperature=0.6, max_turns=1)
    assert rollouts_of(run) == expected
