"""Paired comparison of two policies on the same tasks, and the smallest detectable difference. Pure functions.

Pairing by task removes the variance of task difficulty, which both means share. Source: E. Miller, "Adding Error Bars
to Evals", arXiv:2411.00640, sections 4 (paired differences) and 5 (power).
"""

from dataclasses import dataclass

import numpy as np

from harbortrainer.estimates.interval import (
    CONFIDENCE,
    Estimate,
    IntervalKind,
    Rewards,
    all_equal,
    bounds_of,
    exact_p,
    mean_interval,
    mean_reward,
    stderr_of,
    t_quantile,
    task_means,
)

POWER = 0.8
"""Probability of detecting the smallest detectable difference."""
PERMUTATIONS = 10_000


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The second policy minus the first, on the tasks for which both have graded attempts."""

    first: Estimate
    """Mean reward of the first policy on these tasks."""
    second: Estimate
    """Mean reward of the second policy on these tasks."""
    mean: float
    """Mean over tasks of the difference of the tasks' mean rewards."""
    low: float | None
    """Lower end of its 95 % interval; None if it cannot be computed."""
    high: float | None
    """Upper end of its 95 % interval; None if it cannot be computed."""
    p: float
    """Two-sided p-value of the null hypothesis that both policies are equally good."""
    min_detectable: float | None
    """Smallest true difference that this set detects with probability `POWER`; None if the differences have no
    variance or there is only one task."""
    tasks: int
    """Number of compared tasks."""

    @property
    def significant(self) -> bool:
        """Whether the 95 % interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0.0 or self.high < 0.0)


def paired_difference(
    first: Rewards, second: Rewards, *, kind: IntervalKind = "t", seed: int = 0
) -> PairedDifference | None:
    """Compare two policies; None if they share no task with graded attempts.

    Args:
        first: Rewards of the first policy, by task.
        second: Rewards of the second policy, by task.
        kind: Student's t over the differences, or the bootstrap over tasks with a sign permutation test.
        seed: Seed of the bootstrap and the permutations.
    """
    shared = [key for key, own in first.items() if own and second.get(key)]
    if not shared:
        return None
    before, after = ({key: rewards[key] for key in shared} for rewards in (first, second))
    differences = task_means(after) - task_means(before)
    bounds = (-1.0, 1.0) if bounds_of(before) and bounds_of(after) else None
    low, high = mean_interval(differences, kind=kind, seed=seed, bounds=bounds)
    return PairedDifference(
        first=mean_reward(before, kind=kind, seed=seed),
        second=mean_reward(after, kind=kind, seed=seed),
        mean=float(differences.mean()),
        low=low,
        high=high,
        p=p_value(differences, kind=kind, seed=seed, bounds=bounds),
        min_detectable=min_detectable_difference(differences),
        tasks=len(shared),
    )


def p_value(
    differences: np.ndarray,
    *,
    kind: IntervalKind = "t",
    seed: int = 0,
    bounds: tuple[float, float] | None = None,
) -> float:
    """Return the two-sided p-value of a mean difference of 0, for differences of shape [T].

    The test is Student's t, or for the bootstrap a sign permutation test. If all differences are equal, there is no
    variance for either. It is then the test that belongs to the interval (`mean_interval`), which needs the lowest and
    highest possible difference as `bounds`; the sign test without them.
    """
    if all_equal(np.append(differences, 0.0)):
        return 1.0
    if all_equal(differences):
        return min(1.0, 2.0 * 0.5**differences.size) if bounds is None else exact_p(differences, bounds)
    return _permuted_p(differences, seed) if kind == "bootstrap" else _student_p(differences)


def min_detectable_difference(differences: np.ndarray) -> float | None:
    """Return the smallest true mean difference that a test on such differences, shape [T], detects with `POWER`.

    (t(1 - a/2) + t(power)) * standard error: the usual approximation of the noncentral t. None if the differences have
    no variance.
    """
    error = stderr_of(differences)
    if not error:
        return None
    return (t_quantile((1 + CONFIDENCE) / 2, differences.size) + t_quantile(POWER, differences.size)) * error


def _student_p(differences: np.ndarray) -> float:
    from scipy.special import stdtr

    error = stderr_of(differences)
    assert error
    return float(2 * stdtr(differences.size - 1, -abs(float(differences.mean())) / error))


def _permuted_p(differences: np.ndarray, seed: int) -> float:
    from scipy.stats import permutation_test

    rng = np.random.default_rng(seed)
    found = permutation_test(
        (differences,),
        lambda values, axis: values.mean(axis=axis),
        permutation_type="samples",
        n_resamples=PERMUTATIONS,
        vectorized=True,
        rng=rng,
    )
    return float(found.pvalue)
