"""The held-out gain of a run, counted by hand."""

from pathlib import Path

import pytest

from harbortrainer.runs.checkpoints import Progress
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.provenance import FILE, Provenance, evaluated_training_tasks
from harbortrainer.runs.summary import summarize
from harbortrainer.runs.trial_row import TrialRow, write_rows

REWARDS = {
    0: {"sort": [0.0, 0.0], "join": [1.0, 0.0], "cut": [0.5, None], "only-before": [1.0]},
    2: {"sort": [1.0, 1.0], "join": [1.0, None], "cut": [0.5, 0.5], "only-after": [0.0]},
}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    for step, tasks in REWARDS.items():
        rows = [
            TrialRow(step=step, kind="eval", task=name, task_key=name, trial=f"{name}-{n}", outcome="x", reward=reward)
            for name, rewards in tasks.items()
            for n, reward in enumerate(rewards)
        ]
        write_rows(folder.eval_file(step), rows)
    return folder


def test_gain_is_mean_difference_over_common_tasks(run: RunFolder) -> None:
    summary = summarize(run, Progress(step=2), model="m", seed=0, status="finished")
    gain = summary.gain
    assert gain is not None and gain.low is not None and gain.high is not None
    # sort 1.0 - 0.0, join 1.0 - 0.5, cut 0.5 - 0.5
    assert (gain.mean, gain.tasks) == (pytest.approx(0.5), 3)
    assert gain.low < 0.0 and gain.high == 1.0, "three tasks say little, and no difference exceeds 1"
    assert (
        f"held-out gain: +0.500 [{gain.low:+.3f}, {gain.high:+.3f}] (95 % interval, paired over 3 tasks)"
        in summary.lines(run)
    )


def test_task_of_two_sources_is_paired_within_each_source(run: RunFolder) -> None:
    """The first evaluation of `b` failed. Pooled, the easier `b` would look like a gain."""
    for step, rewards in {0: {"a": 0.0, "b": None}, 2: {"a": 0.0, "b": 1.0}}.items():
        rows = [
            TrialRow(step=step, kind="eval", source=source, task="sort", trial=source, outcome="x", reward=reward)
            for source, reward in rewards.items()
        ]
        write_rows(run.eval_file(step), rows)
    gain = summarize(run, Progress(step=2), model="m", seed=0, status="finished").gain
    assert gain is not None and (gain.mean, gain.tasks) == (0.0, 1)


def test_no_gain_without_two_evaluations(run: RunFolder) -> None:
    assert summarize(run, Progress(step=1), model="m", seed=0, status="finished").gain is None
    assert summarize(run, Progress(step=2), model="m", seed=0, status="interrupted").gain is None


def test_evaluation_on_training_tasks_is_not_called_held_out(run: RunFolder) -> None:
    sources = '[[orchestrator.{}.source]]\nname = "{}"\n'
    run.config_file.write_text(sources.format("train", "own") + sources.format("eval", "same"))
    tasks = {"own": {"sort": "1", "join": "2"}, "same": {"sort": "1", "cut": "3"}}
    (run.path / FILE).write_text(Provenance(tasks=tasks).model_dump_json())
    lines = summarize(run, Progress(step=2), model="m", seed=0, status="finished").lines(run)
    assert "1 of the 2 evaluation tasks are training tasks" in lines
    assert any(line.startswith("evaluation gain: ") for line in lines) and not any("held-out" in line for line in lines)


TRAINED, EVALUATED = {"sort": "1", "join": "2"}, {"sort": "1", "cut": "3"}


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ('name = "own"', {"own": TRAINED, "own (evaluation)": EVALUATED}),
        ('env.taskset.id = "harbor_env"', {"harbor_env": TRAINED, "harbor_env (evaluation)": EVALUATED}),
        ('name = "own"', {"orchestrator.train.source[0].env": TRAINED, "orchestrator.eval.source[0].env": EVALUATED}),
    ],
    ids=["same name", "no name", "prime-rl"],
)
def test_counts_evaluated_training_tasks_by_kind_of_source(run: RunFolder, name: str, recorded: dict) -> None:
    run.config_file.write_text("".join(f"[[orchestrator.{kind}.source]]\n{name}\n" for kind in ("train", "eval")))
    (run.path / FILE).write_text(Provenance(tasks=recorded).model_dump_json())
    assert evaluated_training_tasks(run.path) == (1, 2)


def test_old_record_of_equal_names_counts_nothing(run: RunFolder) -> None:
    run.config_file.write_text("".join(f'[[orchestrator.{k}.source]]\nname = "own"\n' for k in ("train", "eval")))
    (run.path / FILE).write_text(Provenance(tasks={"own": EVALUATED}).model_dump_json())
    assert evaluated_training_tasks(run.path) == (0, 0), "the evaluation's tasks had replaced the trained ones"
