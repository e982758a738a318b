"""Evaluation on held-out sources: which rollouts, which seeds, what came of them.

Invariant: the rollouts of an evaluation and the seeds of their requests follow from the run's seed, the source, the
task and the rollout's number, and from nothing else. The same policy evaluated twice is sampled the same way twice.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harbortrainer.engines.local.rollout import Rollout, outcome_shares
from harbortrainer.engines.local.source import Source, request_seed
from harbortrainer.runs.summary import EvalResult


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """One rollout of an evaluation."""

    source: str
    index: int
    seed: int


def plan_evaluation(sources: Iterable[Source], *, seed: int) -> list[EvalPlan]:
    """Every rollout of one evaluation: `group_size` of each task."""
    return [
        EvalPlan(source.name, index, request_seed(seed, source.name, source.key_of(index), number))
        for source in sources
        for index in range(len(source.tasks))
        for number in range(source.group_size)
    ]


def due(step: int, intervals: Mapping[str, int]) -> list[str]:
    """The sources that are evaluated after step `step`.

    Example:
        >>> due(10, {"held-out": 5})
        ['held-out']
    """
    return [name for name, interval in intervals.items() if step % interval == 0]


def result_of(rollouts: Sequence[Rollout]) -> EvalResult:
    """Mean reward over the rollouts that have one."""
    return EvalResult.of([rollout.reward for rollout in rollouts if rollout.reward is not None])


def eval_metrics(rollouts: Sequence[Rollout], group_sizes: Mapping[str, int]) -> dict[str, float]:
    """Metrics of one evaluation, by source, in Prime-RL's names where it has one (`eval/<source>/.../avg@k`)."""
    metrics: dict[str, float] = {}
    for source, group_size in group_sizes.items():
        own = [rollout for rollout in rollouts if rollout.source == source]
        result = result_of(own)
        prefix = f"eval/{source}/all/agent"
        metrics |= {f"{prefix}/outcome/{name}": share for name, share in outcome_shares(own).items()}
        metrics |= {f"{prefix}/{name}": value for name, value in pass_at_k(own).items()}
        metrics[f"{prefix}/n"] = float(result.n)
        if result.mean_reward is not None:
            metrics[f"{prefix}/avg@{group_size}"] = result.mean_reward
        if result.stderr is not None:
            metrics[f"{prefix}/stderr"] = result.stderr
    return metrics


def pass_at_k(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Unbiased pass@k, mean over tasks, for k = 1, 2, 4, ... (as in Prime-RL); nothing unless rewards are 0 or 1.

    For a task solved c times in n trials, pass@k = 1 - C(n - c, k) / C(n, k).

    Example:
        >>> pass_at_k([Rollout(source="s", outcome="completed", reward=r) for r in (1.0, 0.0)])
        {'pass@1': 0.5, 'pass@2': 1.0}
    """
    tasks: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            tasks.setdefault(rollout.task_key, []).append(rollout.reward)
    if not {reward for own in tasks.values() for reward in own} <= {0.0, 1.0}:
        return {}
    values: dict[str, list[float]] = {}
    for own in tasks.values():
        n, solved = len(own), own.count(1.0)
        for k in (2**i for i in range(n.bit_length())):
            values.setdefault(f"pass@{k}", []).append(1 - math.comb(n - solved, k) / math.comb(n, k))
    return {name: sum(found) / len(found) for name, found in values.items()}
