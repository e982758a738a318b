"""Evaluations of a Prime-RL run and its gain, counted by hand."""

from pathlib import Path

import pytest
from prime_rl_runs import episode
from view_runs import write_rows

from harbortrainer.runs.comparable_evaluations import comparable_evaluations, prime_rl_result_lines
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.prime_rl_files import evaluation_rows


def write_evaluation(run: Path, version: int, rewards: dict[str, float], source: str = "held") -> None:
    """Write an evaluation with one graded trial a task, and one that failed. Step N has policy version N - 1."""
    lines = [
        episode(f"{source}{version}-{task}", reward=reward, task=task, task_key=task)
        for task, reward in rewards.items()
    ]
    lines.append(episode(f"f{source}{version}", ok=False, outcome="sandbox_error", reward=None, rewards=None))
    lines = [line | {"env": {"id": source}} for line in lines]
    write_rows(run / f"rollouts/step_{version + 1}/eval/all/traces.jsonl", lines)


def test_result_of_a_run_is_its_first_and_last_evaluation_and_the_gain(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, {"sort": 0.0, "join": 0.0, "count": 1.0})
    write_evaluation(tmp_path, 4, {"sort": 0.0, "join": 0.0, "count": 0.0})
    write_evaluation(tmp_path, 8, {"sort": 1.0, "join": 0.0, "count": 1.0})
    curve, rewards, gain = prime_rl_result_lines(tmp_path)
    assert "●" in curve
    assert rewards.startswith("held-out mean reward: 0.333 [") and " at policy version 0, 0.667 [" in rewards
    assert rewards.endswith("(3 tasks, 3 trials) at version 8")
    assert gain.startswith("held-out gain: +0.333 [") and gain.endswith("paired over 3 tasks)")


def test_evaluations_over_other_sources_are_left_out(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, {"sort": 0.0})
    write_evaluation(tmp_path, 2, {"join": 0.0}, source="other")
    write_evaluation(tmp_path, 4, {"join": 1.0}, source="other")
    found = comparable_evaluations(RunFolder(tmp_path), evaluation_rows(tmp_path))
    assert {step: one.mean_reward for step, one in found.items()} == {2: 0.0, 4: 1.0}
    assert list(comparable_evaluations(RunFolder(tmp_path), evaluation_rows(tmp_path), 1)) == [0]


def test_mean_has_a_task_of_two_sources_once_for_each_source(tmp_path: Path) -> None:
    played = [("a", "sort", 0.0), ("a", "join", 0.0), ("b", "sort", 1.0)]
    lines = [
        episode(f"{source}-{task}", reward=reward, task=task, task_key=task) | {"env": {"id": source}}
        for source, task, reward in played
    ]
    write_rows(tmp_path / "rollouts/step_1/eval/all/traces.jsonl", lines)
    (found,) = comparable_evaluations(RunFolder(tmp_path), evaluation_rows(tmp_path)).values()
    assert found.mean_reward == pytest.approx(1 / 3) and found.tasks == 3, "as on the embedded engine"


def test_run_without_an_evaluation_has_no_result(tmp_path: Path) -> None:
    assert prime_rl_result_lines(tmp_path) == []
