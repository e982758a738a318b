"""The numbers of one step, from what arrived and what trained. Pure.

Names are Prime-RL's where it has one (`train/agg/all/agent/reward/mean`, `progress/tokens`, `off_policy/mean`,
`time/step`); ours are the outcome shares, the parts of the step's time, and tokens a second.
"""

from collections.abc import Sequence

from harbortrainer.engines.local.batches import Batch
from harbortrainer.engines.local.groups import Group
from harbortrainer.engines.local.rollout import Rollout, outcome_shares
from harbortrainer.engines.local.staleness import OffPolicyBound

SIZES = ("input_tokens", "output_tokens", "total_tokens", "turns", "branches")


def distribution(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, extrema, 10th and 90th percentile (linear interpolation); nothing for no values.

    Example:
        >>> distribution("x", [1.0, 3.0])["x/mean"]
        2.0
    """
    if not values:
        return {}
    ordered = sorted(values)

    def percentile(share: float) -> float:
        rank = share * (len(ordered) - 1)
        low = int(rank)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)

    return {
        f"{prefix}/mean": sum(ordered) / len(ordered),
        f"{prefix}/max": ordered[-1],
        f"{prefix}/min": ordered[0],
        f"{prefix}/p10": percentile(0.1),
        f"{prefix}/p90": percentile(0.9),
    }


def rollout_metrics(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Rewards, sizes, timings and the environment's own metrics of some rollouts."""
    if not rollouts:
        return {}
    out = distribution(f"{prefix}/agent/reward", [r.reward for r in rollouts if r.reward is not None])
    for name in SIZES:
        out |= distribution(f"{prefix}/num_{name}", [float(getattr(r, name)) for r in rollouts])
    out[f"{prefix}/is_truncated/mean"] = sum(r.truncated for r in rollouts) / len(rollouts)
    for kind in ("metrics", "timings"):
        names = sorted({name for r in rollouts for name in getattr(r, kind)})
        for name in names:
            values = [getattr(r, kind)[name] for r in rollouts if name in getattr(r, kind)]
            label = "timing" if kind == "timings" else kind
            out[f"{prefix}/{label}/{name}/mean"] = sum(values) / len(values)
    return out


def solve_rates(prefix: str, groups: Sequence[Group]) -> dict[str, float]:
    """Shares of groups in which no, every, or some survivor got the full reward."""
    rewards = [[r.reward or 0.0 for r in group.survivors] for group in groups]
    none = sum(not any(own) for own in rewards) / len(rewards)
    every = sum(all(value == 1.0 for value in own) for own in rewards) / len(rewards)
    return {
        f"{prefix}/solved_none": none,
        f"{prefix}/solved_all": every,
        f"{prefix}/solved_some": 1 - none - every,
    }


def staleness_metrics(batch: Batch, bound: OffPolicyBound) -> dict[str, float]:
    """How old the trained rollouts are, and how many were dropped for being too old."""
    ages = [
        float(bound.staleness(rollout.version, batch.step))
        for group in batch.groups
        for rollout in group.survivors
        if rollout.version is not None
    ]
    out = {f"off_policy/{name}": call(ages) for name, call in (("mean", _mean), ("max", max)) if ages}
    return out | {"off_policy/dropped": float(batch.dropped)}


def batch_metrics(batch: Batch, bound: OffPolicyBound) -> dict[str, float]:
    """Everything about what arrived for a step and what it trained on."""
    trained = [rollout for group in batch.groups for rollout in group.survivors]
    failed = sum(not rollout.survived for rollout in batch.arrived)
    out = rollout_metrics("train/agg/all", batch.arrived) | rollout_metrics("train/agg/effective", trained)
    out |= solve_rates("train/agg/all/agent", batch.groups) | staleness_metrics(batch, bound)
    out |= {f"train/agg/all/outcome/{name}": share for name, share in outcome_shares(batch.arrived).items()}
    for source in sorted({rollout.source for rollout in batch.arrived}):
        own = [rollout for rollout in batch.arrived if rollout.source == source]
        out[f"batch/{source}"] = len(own) / len(batch.arrived)
        out |= distribution(f"train/{source}/all/agent/reward", [r.reward for r in own if r.reward is not None])
    return out | {
        "train/agg/all/has_error/mean": failed / len(batch.arrived),
        "batch/empty": float(batch.empty_batches),
        "batch/samples": float(len(batch.samples)),
        "progress/tokens": float(sum(r.total_tokens for r in batch.arrived)),
        "progress/input_tokens": float(sum(r.input_tokens for r in trained)),
        "progress/output_tokens": float(sum(r.output_tokens for r in trained)),
        "progress/rollouts": float(len(batch.arrived)),
        "progress/tasks": float(len({r.task_key for r in batch.arrived})),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
