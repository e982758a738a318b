"""The mean reward, pass@k and pass^k of a task set, with confidence intervals. Pure functions.

- Mean reward: the standard error is over tasks, which are the sampling unit. Each task has the same weight, whatever
  its number of graded attempts. Source: E. Miller, "Adding Error Bars to Evals", arXiv:2411.00640.
- pass@k: a task is solved in at least one of k attempts. Source: M. Chen et al., "Evaluating Large Language Models
  Trained on Code", arXiv:2107.03374, section 2.1.
- pass^k: a task is solved in all of k attempts. Source: S. Yao et al., "tau-bench", arXiv:2406.12045, section 3.

Both pass estimators are unbiased for k fresh attempts, given n >= k attempts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

type IntervalKind = Literal["t", "bootstrap"]
type Rewards = Mapping[str, Sequence[float]]
"""The rewards of the graded attempts at each task, by the task's key."""

CONFIDENCE = 0.95
RESAMPLES = 4000
ROUNDING = 1e-9
"""Values within this distance, relative to the largest (or to 1), count as equal: 1/3 has no exact float."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its confidence interval."""

    mean: float | None
    """Mean of the tasks' mean rewards; None when no attempt was graded."""
    low: float | None
    """Lower end of the interval; None if it cannot be computed."""
    high: float | None
    """Upper end of the interval; None if it cannot be computed."""
    stderr: float | None
    """Standard error of the mean, over tasks; None for fewer than two tasks."""
    tasks: int
    """Number of tasks with a graded attempt."""
    attempts: int
    """Number of graded attempts."""

    def __str__(self) -> str:
        if self.mean is None:
            return "none"
        interval = f" [{self.low:.3f}, {self.high:.3f}]" if self.low is not None and self.high is not None else ""
        return f"{self.mean:.3f}{interval}"


def mean_reward(rewards: Rewards, *, kind: IntervalKind = "t", seed: int = 0) -> Estimate:
    """Return the mean over tasks of the tasks' mean rewards, with its 95 % interval.

    Args:
        rewards: Rewards by task. Tasks without a graded attempt are ignored.
        kind: Student's t over the tasks' means, or the percentile bootstrap over tasks.
        seed: Seed of the bootstrap.

    Example:
        >>> print(mean_reward({"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.0, 0.0]}))
        0.500 [0.000, 1.000]
    """
    means = task_means(rewards)
    attempts = sum(map(len, rewards.values()))
    if not means.size:
        return Estimate(None, None, None, None, 0, 0)
    low, high = mean_interval(means, kind=kind, seed=seed, bounds=bounds_of(rewards))
    return Estimate(float(means.mean()), low, high, stderr_of(means), means.size, attempts)


def task_means(rewards: Rewards) -> np.ndarray:
    """Return the mean reward of each task with a graded attempt, shape [T]."""
    return np.array([math.fsum(own) / len(own) for own in rewards.values() if own], dtype=np.float64)


def all_equal(values: np.ndarray) -> bool:
    """Whether all values, shape [T] with T >= 1, are equal up to rounding."""
    return float(np.ptp(values)) <= ROUNDING * max(1.0, float(np.abs(values).max()))


def stderr_of(values: np.ndarray) -> float | None:
    """Return the standard error of the mean of independent values; None for fewer than two."""
    if values.size < 2:
        return None
    return 0.0 if all_equal(values) else float(values.std(ddof=1) / math.sqrt(values.size))


def mean_interval(
    values: np.ndarray, *, kind: IntervalKind, seed: int, bounds: tuple[float, float] | None
) -> tuple[float | None, float | None]:
    """Return the 95 % interval of the mean of independent values.

    A single value, or values that are all equal, have no variance. They get the exact interval of a proportion (Clopper
    and Pearson), or no interval if `bounds` is None.

    Args:
        values: At least one value, shape [T].
        kind: Student's t, or the bootstrap.
        seed: Seed of the bootstrap.
        bounds: Lowest and highest possible value; None if unknown.
    """
    if values.size < 2 or all_equal(values):
        return _exact(values, bounds) if bounds else (None, None)
    low, high = _bootstrap(values, seed) if kind == "bootstrap" else _student(values)
    return (max(low, bounds[0]), min(high, bounds[1])) if bounds else (low, high)


def t_quantile(probability: float, values: int) -> float:
    """Return the quantile of Student's t for the mean of this number of values."""
    from scipy.special import stdtrit

    return float(stdtrit(values - 1, probability))


def _student(values: np.ndarray) -> tuple[float, float]:
    half = t_quantile((1 + CONFIDENCE) / 2, values.size) * float(values.std(ddof=1)) / math.sqrt(values.size)
    return float(values.mean()) - half, float(values.mean()) + half


def _bootstrap(values: np.ndarray, seed: int) -> tuple[float, float]:
    from scipy.stats import bootstrap

    rng = np.random.default_rng(seed)
    found = bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile", rng=rng
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def _exact(values: np.ndarray, bounds: tuple[float, float]) -> tuple[float, float]:
    """Treat the values as successes and failures, which have the largest variance that bounded values can have."""
    from scipy.special import betaincinv

    lowest, highest = bounds
    n, hits, tail = values.size, _hits(values, bounds), (1 - CONFIDENCE) / 2
    low = float(betaincinv(hits, n - hits + 1, tail)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, n - hits, 1 - tail)) if hits < n else 1.0
    return lowest + low * (highest - lowest), lowest + high * (highest - lowest)


def exact_p(values: np.ndarray, bounds: tuple[float, float]) -> float:
    """Return the two-sided p-value of a mean of 0 whose test rejects exactly if `_exact` excludes 0."""
    from scipy.special import betainc

    zero = (0.0 - bounds[0]) / (bounds[1] - bounds[0])
    n, hits = values.size, _hits(values, bounds)
    above = float(betainc(hits, n - hits + 1, zero)) if hits > 0 else 1.0
    below = 1.0 - float(betainc(hits + 1, n - hits, zero)) if hits < n else 1.0
    return min(1.0, 2.0 * min(above, below))


def _hits(values: np.ndarray, bounds: tuple[float, float]) -> float:
    """Return how many successes among failures would have the same mean."""
    return values.size * (float(values.mean()) - bounds[0]) / (bounds[1] - bounds[0])


def bounds_of(rewards: Rewards) -> tuple[float, float] | None:
    """Return (0, 1), Harbor's convention, if every reward is in this range; else None."""
    values = [value for own in rewards.values() for value in own]
    return (0.0, 1.0) if min(values) >= 0.0 and max(values) <= 1.0 else None


SOLVED = 1.0
"""Reward of a solved task, by the convention of Harbor's registry."""


@dataclass(frozen=True, slots=True)
class RepeatedPass:
    """pass@k or pass^k for one k."""

    name: str
    """Name of the metric, such as `pass@4` or `pass^4`."""
    estimate: Estimate
    """Mean over the tasks with at least k graded attempts."""


def pass_at(n: int, solved: int, k: int) -> float:
    """Return the probability that at least one of k attempts solves a task: 1 - C(n-c, k) / C(n, k).

    Args:
        n: Attempts that were made.
        solved: Number c of these that solved the task.
        k: Attempts to consider, at most n.

    Example:
        >>> pass_at(4, 1, 2)
        0.5
    """
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def pass_hat(n: int, solved: int, k: int) -> float:
    """Return the probability that all of k attempts solve a task: C(c, k) / C(n, k). Arguments as in `pass_at`.

    Example:
        >>> pass_hat(4, 2, 2) == 1 / 6
        True
    """
    return math.comb(solved, k) / math.comb(n, k)


def repeated_passes(rewards: Rewards, *, kind: IntervalKind = "t") -> list[RepeatedPass]:
    """Return pass@k and pass^k, averaged over tasks, for k = 1, 2, 4, ... and the highest number of attempts.

    Empty unless every reward is 0 or 1: non-binary rewards have no threshold for "solved".
    """
    if not {value for own in rewards.values() for value in own} <= {0.0, SOLVED}:
        return []
    attempts = max(map(len, rewards.values()), default=0)
    ks = sorted({2**power for power in range(attempts.bit_length())} | {attempts}) if attempts else []
    return [_pass(rewards, name, k, estimator, kind) for name, estimator in _ESTIMATORS.items() for k in ks]


_ESTIMATORS: dict[str, Callable[[int, int, int], float]] = {"pass@": pass_at, "pass^": pass_hat}


def _pass(
    rewards: Rewards, name: str, k: int, estimator: Callable[[int, int, int], float], kind: IntervalKind
) -> RepeatedPass:
    solved = {key: sum(value >= SOLVED for value in own) for key, own in rewards.items()}
    rates = {key: [estimator(len(own), solved[key], k)] for key, own in rewards.items() if len(own) >= k}
    return RepeatedPass(f"{name}{k}", mean_reward(rates, kind=kind))
