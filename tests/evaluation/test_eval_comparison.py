"""Paired comparison of two evaluations, with notes about other differences."""

from pathlib import Path

import pytest
from eval_folders import LOST, evaluation

from harbortrainer.cli import main
from harbortrainer.errors import UserError
from harbortrainer.estimates.paired import paired_difference
from harbortrainer.evaluation.eval_comparison import EvalComparison

BEFORE = {"a": [0.0, 0.0], "b": [1.0, 0.0], "c": [0.0, 1.0], "d": [0.0, LOST], "e": [LOST, LOST]}
AFTER = {"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.0, 0.0], "d": [1.0, 1.0], "f": [1.0, 1.0]}


def test_compares_tasks_graded_in_both(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", BEFORE, policy="before")
    b = evaluation(tmp_path / "b", AFTER, policy="after")
    found = EvalComparison.of(a, b)
    kept = [{task: [r for r in own if r is not None] for task, own in side.items()} for side in (BEFORE, AFTER)]
    assert found.found == paired_difference(*kept)
    assert found.found.tasks == 4
    text = "\n".join(found.lines())
    assert "1 tasks of A are not in the other: e" in text and "1 tasks of B are not in the other: f" in text
    assert "3 of 10 trials of A are lost or missing" in text and "the rules differ" not in text
    assert text.index("0.000 -> 1.000  d") < text.index("0.500 -> 0.000  c")


def test_notes_report_other_rules_and_equal_policies(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", AFTER)
    b = evaluation(tmp_path / "b", AFTER, environment="docker")
    text = "\n".join(EvalComparison.of(a, b).lines())
    assert "environment_type was 'local' and is 'docker'" in text and "A and B are the same policy" in text
    assert "no task has a different mean reward" in text and "unknown" in text


@pytest.mark.parametrize("kind", ["t", "bootstrap"])
def test_significance_of_gain(tmp_path: Path, kind: str, capsys) -> None:
    gained = {str(task): [0.0, 0.0, float(task % 3 == 0)] for task in range(24)}
    evaluation(tmp_path / "a", gained)
    evaluation(tmp_path / "b", {task: [own[2], 1.0, 1.0] for task, own in gained.items()}, policy="n")
    assert main(["eval", "--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--ci", kind]) == 0
    said = capsys.readouterr().out
    assert "B is better than A" in said and "could show" in said and f"{kind} over tasks" in said
    assert main(["eval", "--compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert "no significant difference" in capsys.readouterr().out


def test_refuses_evaluations_without_common_tasks(tmp_path: Path, capsys) -> None:
    a, b = evaluation(tmp_path / "a", {"x": [1.0]}), evaluation(tmp_path / "b", {"y": [1.0]})
    with pytest.raises(UserError, match="no task has graded trials in both"):
        EvalComparison.of(a, b)
    assert main(["eval", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
