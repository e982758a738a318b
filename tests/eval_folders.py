"""Evaluation folders for tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from harbortrainer.evaluation.eval_folder import EvalFolder, EvalSpec
from harbortrainer.evaluation.eval_rules import EvalRules
from harbortrainer.runs.trial_row import TrialRow
from harbortrainer.trials.outcome import Outcome

LOST = None
"""Reward of an attempt that was not graded."""


def eval_spec(tasks: Sequence[str], *, policy: str = "m", attempts: int = 2, environment: str = "local") -> EvalSpec:
    """Return the specification of an evaluation."""
    return EvalSpec(
        policy=policy,
        identity={"model": policy},
        tasks_dir="tasks",
        tasks={name: f"key-{name}" for name in tasks},
        attempts=attempts,
        rules=EvalRules.of(None, environment=environment),
    )


def row(task: str, attempt: int, reward: float | None, **keys: object) -> TrialRow:
    """Return the row of a trial; without a reward, its sandbox failed."""
    fields: dict[str, object] = {
        "task": task,
        "task_key": f"key-{task}",
        "attempt": attempt,
        "trial": f"{task}__{attempt}",
        "outcome": Outcome.completed if reward is not None else Outcome.sandbox_error,
        "reward": reward,
    }
    return TrialRow.model_validate(fields | keys)


def rows_of(rewards: Mapping[str, Sequence[float | None]]) -> list[TrialRow]:
    """Return rows of trials with these rewards, by task."""
    return [row(task, number, reward) for task, own in rewards.items() for number, reward in enumerate(own)]


def evaluation(
    path: Path, rewards: Mapping[str, Sequence[float | None]], *, policy: str = "m", environment: str = "local"
) -> EvalFolder:
    """Create the folder of a finished evaluation."""
    most = max(map(len, rewards.values()))
    spec = eval_spec(list(rewards), policy=policy, attempts=most, environment=environment)
    folder = EvalFolder.begin(path, spec, resume=False)
    for trial in rows_of(rewards):
        folder.add(trial)
    folder.release()
    return folder
