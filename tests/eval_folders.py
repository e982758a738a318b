"""Evaluations as they lie on disk, for the tests that read them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from harbortrainer.evaluation.eval_folder import EvalFolder, Evaluated
from harbortrainer.evaluation.play_rules import PlayRules
from harbortrainer.evaluation.trial_row import TrialRow
from harbortrainer.trials.outcome import Outcome

LOST = None
"""The reward of an attempt that failed for no fault of the policy's."""


def about(tasks: Sequence[str], *, policy: str = "m", attempts: int = 2, environment: str = "local") -> Evaluated:
    """An evaluation of some tasks."""
    return Evaluated(
        policy=policy,
        identity={"model": policy},
        tasks_dir="tasks",
        tasks={name: f"key-{name}" for name in tasks},
        attempts=attempts,
        rules=PlayRules.of(None, environment=environment),
    )


def row(task: str, attempt: int, reward: float | None, **keys: object) -> TrialRow:
    """One trial; without a reward its sandbox failed."""
    told: dict[str, object] = {
        "task": task,
        "task_key": f"key-{task}",
        "attempt": attempt,
        "trial": f"{task}__{attempt}",
        "outcome": Outcome.completed if reward is not None else Outcome.sandbox_error,
        "reward": reward,
    }
    return TrialRow.model_validate(told | keys)


def rows_of(rewards: Mapping[str, Sequence[float | None]]) -> list[TrialRow]:
    """The trials with these rewards, by task."""
    return [row(task, number, reward) for task, own in rewards.items() for number, reward in enumerate(own)]


def evaluation(
    path: Path, rewards: Mapping[str, Sequence[float | None]], *, policy: str = "m", environment: str = "local"
) -> EvalFolder:
    """A finished evaluation."""
    most = max(map(len, rewards.values()))
    told = about(list(rewards), policy=policy, attempts=most, environment=environment)
    folder = EvalFolder.begin(path, told, resume=False)
    for trial in rows_of(rewards):
        folder.add(trial)
    folder.release()
    return folder
