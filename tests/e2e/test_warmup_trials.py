"""Warm-up with real trials: prompts equal Terminus-2's, and solutions can be replayed."""

import shutil
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")

from harbortrainer.config.agent_table import PLAIN_AGENT
from harbortrainer.errors import UserError
from harbortrainer.tasks.task_folder import load_folder
from harbortrainer.warmup.demonstrations import CONFIRMED
from harbortrainer.warmup.replay import replay, run_scripted_trial
from tiny_policy import prompts

TASK = Path(__file__).parents[2] / "datasets/quickstart/train/sort-grape-bronze"
INSTRUCTION = (TASK / "instruction.md").read_text()
HOST = {"image": "host"}
SORTED = ["sort grape.txt > bronze.txt"]

pytestmark = pytest.mark.e2e


async def test_demonstrations_equal_real_trial_prompts(tmp_path: Path):
    turns = await run_scripted_trial(TASK, [prompts.solved(SORTED), CONFIRMED], tmp_path, "local", HOST)
    assert turns is not None
    first, second = (prompt for prompt, _ in turns)
    assert first in {prompts.first_prompt(INSTRUCTION, pace) for pace in ("ready", "late")}
    assert second in {prompts.confirmation_prompt(SORTED, pace) for pace in ("ready", "late")}


async def test_solution_replay_gives_demonstration(tmp_path: Path):
    (turns,) = await replay(load_folder(TASK), environment_type="local", environment_kwargs=HOST, work_dir=tmp_path)
    assert len(turns) == 3
    assert "sort grape.txt > bronze.txt" in turns[0][1]


async def test_solution_is_one_command_of_the_plain_agent(tmp_path: Path):
    play = partial(replay, environment_type="local", environment_kwargs=HOST, work_dir=tmp_path, agent=PLAIN_AGENT)
    found = await play(load_folder(TASK))
    assert found == [((INSTRUCTION.strip(), SORTED[0]),)]
    shutil.copytree(TASK, tmp_path / "wrong")
    (tmp_path / "wrong/solution/solve.sh").write_text("#!/bin/sh\n# a comment\ncd /app\ncp grape.txt bronze.txt\n")
    told: list[tuple[str, bool]] = []
    assert (
        await play(load_folder(tmp_path / "wrong"), report=lambda task, solved: told.append((task.name, solved))) == []
    )
    assert told == [("wrong", False)]


async def test_exposed_task_is_refused_before_any_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_PAT", "of the user")
    for name in ("plain", "takes"):
        shutil.copytree(TASK, tmp_path / "tasks" / name)
    with (tmp_path / "tasks/takes/task.toml").open("a") as file:
        file.write('\n[solution.env]\nX = "${MY_PAT}"\n')
    (tmp_path / "tasks/takes/instruction.md").write_text("Another one.")
    (work := tmp_path / "work").mkdir()
    tasks = load_folder(tmp_path / "tasks")
    with pytest.raises(UserError, match=r'takes .*add `trusted_tasks = \["takes"\]` to \[warmup\]'):
        await replay(tasks, environment_type="local", environment_kwargs=HOST, work_dir=work)
    assert list(work.iterdir()) == []
    found = await replay(tasks, environment_type="local", environment_kwargs=HOST, trusted=["takes"], work_dir=work)
    assert len(found) == 2


async def test_wrong_solution_gives_no_demonstration(tmp_path: Path):
    answers = [prompts.solved(["cp grape.txt bronze.txt"]), CONFIRMED]
    assert await run_scripted_trial(TASK, answers, tmp_path, "local", HOST) is None
