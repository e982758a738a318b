"""Small stand-ins for what the loop is given."""

from collections.abc import Sequence

from harbortrainer.engines.local.groups import Group
from harbortrainer.engines.local.learner.sample import Sample
from harbortrainer.engines.local.rollout import Rollout
from harbortrainer.engines.local.schedule import Plan


def sample(version: int = 0) -> Sample:
    """Three tokens, two of them sampled."""
    return Sample(
        token_ids=[1, 2, 3],
        mask=[False, True, True],
        logprobs=[0.0, -0.5, -0.25],
        versions=[0, version, version],
        temperature=1.0,
        advantage=0.0,
    )


def rollout(reward: float | None, *, version: int = 0, outcome: str = "", error: str | None = None) -> Rollout:
    """A rollout with this reward; None is a sandbox that died."""
    failed = reward is None
    return Rollout(
        source="s",
        task="t",
        task_key="k",
        outcome=outcome or ("sandbox_error" if failed else "completed"),
        reward=reward,
        samples=[] if failed else [sample(version)],
        version=None if failed else version,
        error=error or ("sandbox_error: no such namespace" if failed else None),
        total_tokens=0 if failed else 3,
    )


def group_of(
    rewards: Sequence[float | None], *, version: int = 0, versions: Sequence[int] | None = None, name: str = "g"
) -> Group:
    """A finished group with these rewards."""
    group = Group(id=name, plan=Plan("s", 0), size=len(rewards))
    group.start(version)
    for index, reward in enumerate(rewards):
        group.add(rollout(reward, version=versions[index] if versions else version))
    return group
