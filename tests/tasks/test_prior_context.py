"""A task's trajectory.json, which Harbor loads into the agent since 0.25, is refused for agents that cannot load it."""

import json
from pathlib import Path

import pytest
from harbor.models.task.paths import TaskPaths
from task_sets import make_task

from harbortrainer.config.agent_table import PLAIN_AGENT, TRAINABLE_TERMINUS
from harbortrainer.doctor.refused_tasks import refused_tasks
from harbortrainer.tasks.task_check import check_tasks
from harbortrainer.tasks.task_folder import load_folder

IS_LOADED = hasattr(TaskPaths, "trajectory_path")
SEEN = {
    "schema_version": "ATIF-v1.6",
    "session_id": "a",
    "agent": {"name": "a", "version": "1"},
    "steps": [{"step_id": 1, "source": "user", "message": "hi"}],
}
CANNOT_LOAD = "trajectory.json is prior context, which the agent cannot load"
INVALID = "trajectory.json is not a trajectory in Harbor's format (ATIF)"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    folder = make_task(tmp_path / "one")
    (folder / "environment").mkdir()
    (folder / "environment/Dockerfile").write_text("FROM debian:12-slim\n")
    (folder / "trajectory.json").write_text(json.dumps(SEEN))
    return folder


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        (TRAINABLE_TERMINUS, CANNOT_LOAD),
        (PLAIN_AGENT, CANNOT_LOAD),
        ("plain", CANNOT_LOAD),
        ("terminus-2", CANNOT_LOAD),
        ("claude-code", ""),
        ("oracle", ""),
        ("nowhere:Nothing", ""),
    ],
)
def test_agent_that_cannot_load_a_trajectory_cannot_play_the_task(task: Path, agent: str, expected: str) -> None:
    assert refused_tasks(load_folder(task), agent) == ({"one": expected} if IS_LOADED and expected else {})


def test_only_the_trajectory_of_the_first_step_counts_and_must_be_valid(task: Path) -> None:
    (task / "task.toml").write_text('[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n')
    for step in "ab":
        (task / "steps" / step).mkdir(parents=True)
        (task / "steps" / step / "instruction.md").write_text("Do it.")
    (task / "steps/b/trajectory.json").write_text("{}")
    assert refused_tasks(load_folder(task), "codex") == {}
    (task / "steps/a/trajectory.json").write_text("{}")
    assert refused_tasks(load_folder(task), "codex") == ({"one": INVALID} if IS_LOADED else {})


async def test_check_runs_cheats_on_a_task_with_a_trajectory(task: Path) -> None:
    (task / "tests/test.sh").write_text("if [ -e /done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n")
    (task / "solution").mkdir()
    (task / "solution/solve.sh").write_text("touch /done\n")
    (verdict,) = await check_tasks(load_folder(task), cheats=["replaced-tools"])
    assert [trial.reward for trial in verdict.trials] == [1, 0, 0]
    assert verdict.note == (f"Terminus-2 cannot play it: {CANNOT_LOAD}" if IS_LOADED else "")
