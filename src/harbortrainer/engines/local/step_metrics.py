"""Metrics of one step: trials, rewards, times, costs and sampling throughput.

Names are Prime-RL's where it has one (`train/agg/all/agent/reward/mean`, `progress/tokens`, `off_policy/mean`,
`time/step`). Invariants: `all` covers every trial that returned, `effective` the trials that trained. Each figure has
one name. docs/metrics.md lists all of them, and a test compares it with a real run.
"""

import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean

import numpy as np

from harbortrainer.config.run_sections import Prices
from harbortrainer.engines.local.rollouts.batch import OffPolicyBound, StepBatch
from harbortrainer.engines.local.rollouts.group import DropReason, Group
from harbortrainer.engines.local.rollouts.rollout import Rollout, outcome_shares
from harbortrainer.estimates.interval import SOLVED
from harbortrainer.runs.curve import TRAIN_KEY
from harbortrainer.trials.outcome import Outcome

SIZES = ("input_tokens", "output_tokens", "total_tokens", "turns", "branches")
COUNTED_BY_STEP = {f"outcome_{outcome}" for outcome in Outcome} | {"turns", "tokens_prompt", "tokens_completion"}
"""Metrics of a trial that a step computes itself, over all trials, including those that reported none."""
REWARD_METRIC = "reward_reward"
"""The metric of the verifier's key `reward`, which is the trial's reward."""
PRUNED = (DropReason.NO_SIGNAL, DropReason.AT_THE_MEAN, DropReason.REJECTED)
"""Reasons of graded trials that were compared with their group."""


def distribution(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean, extrema, 10th and 90th percentile (linear interpolation); empty without values.

    Example:
        >>> distribution("x", [1.0, 3.0])["x/mean"]
        2.0
    """
    if not values:
        return {}
    p10, p90 = map(float, np.percentile(values, (10, 90)))
    numbers = {"mean": fmean(values), "max": max(values), "min": min(values), "p10": p10, "p90": p90}
    return {f"{prefix}/{name}": value for name, value in numbers.items()}


def sizes_and_rewards(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return rewards, sizes and truncation; failed rollouts have no reward and do not count as 0."""
    if not rollouts:
        return {}
    out = distribution(f"{prefix}/agent/reward", [r.reward for r in rollouts if r.reward is not None])
    for name in SIZES:
        out |= distribution(f"{prefix}/num_{name}", [float(getattr(r, name)) for r in rollouts])
    return out | {f"{prefix}/agent/is_truncated/mean": fmean(r.truncated for r in rollouts)}


def outcome_metrics(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the share of every outcome, with Prime-RL's names."""
    shares = outcome_shares(rollouts) if rollouts else {}
    return {f"{prefix}/agent/metrics/outcome_{name}/mean": share for name, share in shares.items()}


def environment_metrics(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the means of the environment's metrics, each over the rollouts that have it."""
    tables = [rollout.metrics for rollout in rollouts]
    names = {name for table in tables for name in table} - COUNTED_BY_STEP - {REWARD_METRIC}
    return {
        f"{prefix}/agent/metrics/{name}/mean": fmean(table[name] for table in tables if name in table)
        for name in sorted(names)
    }


def solve_rates(prefix: str, groups: Sequence[Group]) -> dict[str, float]:
    """Return the shares of groups whose rewards are all 0, all 1, or anything else, as in Prime-RL.

    Groups without a graded trial are left out.
    """
    rewards = [own for group in groups if (own := [r.reward for r in group.rollouts if r.reward is not None])]
    if not rewards:
        return {}
    none = fmean(not any(own) for own in rewards)
    every = fmean(all(value == 1.0 for value in own) for own in rewards)
    return {f"{prefix}/solved_none": none, f"{prefix}/solved_all": every, f"{prefix}/solved_some": 1 - none - every}


def wasted_tokens(batch: StepBatch, discarded: int) -> dict[str, float]:
    """Return the share of the sampled tokens that no group's comparison used; empty if no token was sampled.

    A token is used if its trial trained, or was graded and compared with its group. Unused are the tokens of failed
    trials and attempts, of calls that a trial dropped, of lost and of too old groups.

    Args:
        batch: The step's batch.
        discarded: Tokens sampled for no trial that returned: failed attempts, cancelled trials.
    """
    used = sum(r.output_tokens for r, _, reason in batch.rollout_advantages() if reason is None or reason in PRUNED)
    sampled = discarded + sum(r.logged_tokens for r in batch.rollouts)
    return {"tokens/wasted": 1 - used / sampled} if sampled else {}


def batch_metrics(
    batch: StepBatch, bound: OffPolicyBound, sources: Collection[str], *, discarded: int = 0
) -> dict[str, float]:
    """Return the metrics of the trials that arrived for a step, and of those that it trained on.

    Args:
        batch: The step's batch.
        bound: The off-policy bound, for the staleness.
        sources: The names of the run's training sources.
        discarded: Tokens sampled since the last step for no trial that returned.
    """
    returned, trained = [r for r in batch.rollouts if r.returned], batch.trained
    ages = [float(bound.staleness(r.version, batch.step)) for r in trained if r.version is not None]
    out = sizes_and_rewards("train/agg/all", returned) | sizes_and_rewards("train/agg/effective", trained)
    out |= outcome_metrics("train/agg/all", returned) | environment_metrics("train/agg/all", returned)
    out |= solve_rates("train/agg/all/agent", batch.arrived) | source_metrics(returned, sources)
    out |= wasted_tokens(batch, discarded)
    out |= {"off_policy/mean": fmean(ages), "off_policy/max": max(ages)} if ages else {}
    return out | {
        "train/agg/all/has_error/mean": fmean(not r.outcome.trains for r in returned),
        "off_policy/dropped": float(batch.dropped),
        "batch/empty": float(batch.empty_batches),
        "batch/refills": float(batch.refills),
        "samples/truncated": float(sum(r.truncated_samples for r in returned)),
        "samples/pruned": float(sum(len(r.samples) for r, _, reason in batch.rollout_advantages() if reason in PRUNED)),
        "tokens/truncated": float(sum(r.truncated_tokens for r in returned)),
        "progress/tokens": float(sum(r.total_tokens for r in returned)),
        "progress/input_tokens": float(sum(r.input_tokens for r in trained)),
        "progress/output_tokens": float(sum(r.output_tokens for r in trained)),
        "progress/rollouts": float(len(returned)),
        "progress/trained": float(len(trained)),
        "progress/tasks": float(len({r.task_key for r in returned})),
    }


def cost_metrics(rollouts: Sequence[Rollout], prices: Prices, seconds: float) -> dict[str, float]:
    """Dollars of a step, and for each task that a trial of it solved; failed trials were paid for too.

    Args:
        rollouts: Every trial that came returned for the step.
        prices: What is paid.
        seconds: The step's.
    """
    prompt, sampled = sum(r.prompt_tokens for r in rollouts), sum(r.sampled_tokens for r in rollouts)
    cost = prices.cost(prompt_tokens=prompt, sampled_tokens=sampled, seconds=seconds)
    solved = {r.task_key for r in rollouts if r.reward is not None and r.reward >= SOLVED}
    return {"cost/step": cost} | ({"cost/solved_task": cost / len(solved)} if solved else {})


def source_metrics(rollouts: Sequence[Rollout], sources: Collection[str]) -> dict[str, float]:
    """Return the share and rewards of each source if there are several; the share is 0 without a trial."""
    out: dict[str, float] = {}
    for name in sorted(sources) if len(sources) > 1 else ():
        own = [rollout for rollout in rollouts if rollout.source == name]
        out[f"batch/{name}"] = len(own) / len(rollouts)
        out |= distribution(f"train/{name}/all/agent/reward", [r.reward for r in own if r.reward is not None])
    return out


def headline(
    step: int, max_steps: int | None, numbers: Mapping[str, float], untrained: Mapping[DropReason, int] | None = None
) -> str:
    """Return a one-line summary of a step, with the reasons why trials did not train."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in (untrained or {}).items())
    of = f"/{max_steps}" if max_steps else ""
    failed = numbers.get("train/agg/all/has_error/mean", 0.0)
    parts = [
        f"step {step}{of}",
        f"reward {numbers.get(TRAIN_KEY, float('nan')):.3f}",
        f"{numbers['progress/rollouts']:.0f} trials, {numbers['progress/trained']:.0f} trained"
        + (f" ({reasons})" if reasons else ""),
        f"{numbers['time/step']:.1f} s (waited {numbers['time/wait_for_rollouts']:.1f})",
    ]
    if failed:
        parts.append(f"{failed:.0%} of trials failed")
    if numbers.get("memory/halved"):
        tokens = numbers["memory/micro_batch_tokens"]
        parts.append(f"out of memory: restarted the step with micro batches of {tokens:.0f} tokens")
    return "  ".join(parts)


class Stopwatch:
    """Sums the seconds of named parts of a step; `lap` returns them and starts the next step."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._step = time.monotonic()
        self._before: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
        """Add the block's seconds to the part `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.metrics[name] = self.metrics.get(name, 0.0) + time.monotonic() - start

    def lap(self) -> dict[str, float]:
        """Return the parts since the last lap, their total as `time/step`, and the other `metrics` added since."""
        out, self.metrics = self.metrics | {"time/step": time.monotonic() - self._step}, {}
        self.restart()
        return out

    def restart(self) -> None:
        """Start the step now; earlier time does not count."""
        self._step = time.monotonic()

    def rates(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Return the sampling throughput since the last call, from the counters `sampled_tokens` and `busy_s`."""
        change = {name: value - self._before.get(name, 0.0) for name, value in counters.items()}
        self._before = dict(counters)
        out = {"time/sample": change["busy_s"], "sampler/tokens": change["sampled_tokens"]}
        if change["busy_s"] > 0:
            out["perf/sampled_tokens_per_s"] = change["sampled_tokens"] / change["busy_s"]
        return out
