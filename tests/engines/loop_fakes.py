"""Small samples, rollouts and groups for tests of the training loop."""

import itertools
from collections.abc import Sequence

from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.rollouts.group import Group
from harbortrainer.engines.local.rollouts.reward_check import RewardSnapshot
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.rollouts.schedule import Plan
from harbortrainer.trials.outcome import Outcome

NUMBERS = itertools.count()


def sample(version: int = 0, trial: str = "") -> Sample:
    """Return a sample of three tokens; the last two are sampled."""
    return Sample(
        token_ids=[1, 2, 3],
        mask=[False, True, True],
        logprobs=[0.0, -0.5, -0.25],
        versions=[0, version, version],
        temperature=1.0,
        advantage=0.0,
        task_key="t",
        trial_name=trial,
    )


def rollout(reward: float | None, *, version: int = 0, outcome: str = "", error: str | None = None) -> Rollout:
    """Return a rollout with this reward; None stands for a failed sandbox."""
    failed = reward is None
    trial = f"t__{next(NUMBERS)}"
    return Rollout(
        source="s",
        task="t",
        task_key="k",
        trial=trial,
        outcome=Outcome(outcome or ("sandbox_error" if failed else "completed")),
        reward=reward,
        samples=[] if failed else [sample(version, trial)],
        version=None if failed else version,
        error=error or ("sandbox_error: no such namespace" if failed else None),
        total_tokens=0 if failed else 3,
        reward_snapshot=None
        if failed
        else RewardSnapshot(trial, "completed", reward, {"reward": reward}, None, None, (0, 3, 0)),
    )


def group_of(
    rewards: Sequence[float | None], *, version: int = 0, versions: Sequence[int] | None = None, name: str = "g"
) -> Group:
    """Return a finished group with these rewards."""
    group = Group(id=name, plan=Plan("s", 0), size=len(rewards))
    group.start(version)
    for index, reward in enumerate(rewards):
        group.add(rollout(reward, version=versions[index] if versions else version))
    return group
