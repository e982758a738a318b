"""Paired comparison of two policies, compared with scipy and a simulation with a known difference."""

import numpy as np
import pytest
from interval_coverage import Setting, compared
from scipy import stats

from harbortrainer.estimates.interval import IntervalKind
from harbortrainer.estimates.paired import min_detectable_difference, paired_difference

BEFORE = {"a": [0.0, 0.0], "b": [1.0, 0.0], "c": [0.0, 1.0], "d": [0.0, 0.0], "only before": [1.0], "lost": [1.0]}
AFTER = {"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [1.0, 1.0], "d": [0.0, 0.0], "only after": [0.0], "lost": []}


def test_paired_test_equals_scipy_on_shared_tasks():
    found = paired_difference(BEFORE, AFTER)
    assert found is not None
    theirs = stats.ttest_rel([0.5, 1.0, 1.0, 0.0], [0.0, 0.5, 0.5, 0.0])
    interval = theirs.confidence_interval(0.95)
    assert (found.tasks, found.mean, found.p) == (4, 0.375, pytest.approx(theirs.pvalue))
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert (found.first.mean, found.second.mean) == (0.25, 0.625)


def test_task_difficulty_cancels():
    rng = np.random.default_rng(0)
    hard = {str(task): [float(rate)] for task, rate in enumerate(rng.random(40))}
    better = {task: [rate + 0.05 + 0.01 * (int(task) % 2)] for task, (rate,) in hard.items()}
    found = paired_difference(hard, better)
    assert found is not None and found.significant and found.low is not None and found.low > 0.05


def test_no_shared_task_gives_none():
    assert paired_difference({"a": [1.0], "b": []}, {"b": [1.0], "c": [0.0]}) is None


def test_zero_differences_get_an_interval():
    found = paired_difference(BEFORE, BEFORE)
    assert found is not None and (found.mean, found.p, found.min_detectable) == (0.0, 1.0, None)
    assert found.low is not None and found.high is not None and found.low < -0.2 and found.high > 0.2


def test_equal_gains_get_the_sign_test():
    tasks = [str(task) for task in range(8)]
    found = paired_difference({task: [0.0] for task in tasks}, {task: [1.0] for task in tasks})
    assert found is not None and found.p == pytest.approx(stats.binomtest(8, 8).pvalue) and found.significant


@pytest.mark.parametrize("kind", ["t", "bootstrap"])
def test_gains_equal_up_to_rounding_are_equal(kind):
    """Two of five instead of one of five, three instead of two: not 0.2 and 0.2 in floating point."""
    before, after = ({"a": [1.0] * n + [0.0] * (5 - n), "b": [1.0] * (n + 1) + [0.0] * (4 - n)} for n in (1, 2))
    found = paired_difference(before, after, kind=kind)
    assert found is not None and not found.significant
    assert (found.mean, found.p, found.min_detectable) == (pytest.approx(0.2), 1.0, None)
    assert found.low is not None and found.low < -0.5


def test_equal_rewards_with_different_attempts_are_no_difference():
    tasks = [str(task) for task in range(10)]
    found = paired_difference({task: [0.1] * 3 for task in tasks}, {task: [0.1] for task in tasks})
    assert found is not None and not found.significant
    assert (found.mean, found.p, found.min_detectable) == (pytest.approx(0.0), 1.0, None)


def test_bootstrap_uses_the_permutation_test():
    rng = np.random.default_rng(2)
    first = {str(task): [float(value)] for task, value in enumerate(rng.random(30))}
    second = {task: [value + float(rng.normal(0.1, 0.2))] for task, (value,) in first.items()}
    by_t, by_resampling = (paired_difference(first, second, kind=kind) for kind in ("t", "bootstrap"))
    assert by_t is not None and by_resampling is not None
    assert by_resampling.p == pytest.approx(by_t.p, abs=0.02)
    assert by_resampling.low == pytest.approx(by_t.low, abs=0.03)
    assert by_resampling == paired_difference(first, second, kind="bootstrap")


def test_coverage_false_positives_and_power_of_the_paired_test():
    # 800 comparisons: standard errors of 0.8 % and 1.4 %.
    held, alarms, power = compared(Setting(40, 4, 1.0, 1.0), 800, seed=5)
    assert 0.925 <= held <= 0.975
    assert 0.025 <= alarms <= 0.075
    assert 0.74 <= power <= 0.88


def test_one_task_has_no_min_detectable_difference():
    assert min_detectable_difference(np.array([0.5])) is None


@pytest.mark.parametrize("kind", ["t", "bootstrap"])
@pytest.mark.parametrize("tasks", [1, 2, 5, 6, 10, 30, 100])
@pytest.mark.parametrize("gain", [-1.0, -0.5, 0.25, 0.5, 0.75, 1.0])
def test_equal_gains_have_a_p_value_that_agrees_with_the_interval(kind: IntervalKind, tasks: int, gain: float) -> None:
    low, high = max(0.0, -gain), max(0.0, gain)
    first, second = ({str(task): [value] for task in range(tasks)} for value in (low, high))
    found = paired_difference(first, second, kind=kind)
    assert found is not None and found.low is not None and found.high is not None
    assert (found.p < 0.05) == (found.low > 0 or found.high < 0)
