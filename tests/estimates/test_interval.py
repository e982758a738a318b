"""Mean reward of a task set and its confidence interval, compared with scipy."""

import math

import numpy as np
import pytest
from interval_coverage import Setting, attempted, coverage
from scipy import stats

from harbortrainer.estimates.interval import Rewards, mean_reward, task_means

REWARDS = {"a": [1.0, 0.0, 1.0], "b": [0.0, 0.0], "c": [1.0], "d": [0.5, 1.0], "never graded": []}


def test_interval_equals_scipy_over_task_means():
    found = mean_reward(REWARDS)
    means = [2 / 3, 0.0, 1.0, 0.75]
    expected = stats.ttest_1samp(means, 0.0).confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(means))
    assert found.stderr == pytest.approx(stats.sem(means))
    # Rewards are between 0 and 1, and so is their mean.
    assert (found.low, found.high) == (pytest.approx(max(0.0, expected.low)), pytest.approx(min(1.0, expected.high)))
    assert (found.tasks, found.attempts) == (4, 8)


def test_rewards_outside_0_and_1_do_not_clip_the_interval():
    found = mean_reward({"a": [0.0], "b": [3.0], "c": [-2.0]})
    expected = stats.ttest_1samp([0.0, 3.0, -2.0], 0.0).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_more_attempts_do_not_lower_the_standard_error():
    once, often = ({"a": [1.0] * k, "b": [0.0] * k, "c": [1.0] * k} for k in (1, 50))
    assert mean_reward(once).stderr == mean_reward(often).stderr


def test_tasks_have_equal_weight_for_any_number_of_attempts():
    assert mean_reward({"a": [1.0], "b": [0.0] * 9}).mean == 0.5


@pytest.mark.parametrize(("value", "low", "high"), [(0.0, 0.0, 0.3085), (1.0, 0.6915, 1.0)])
def test_equal_task_means_get_the_exact_interval(value: float, low: float, high: float):
    found = mean_reward({str(task): [value] for task in range(10)})
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    exact = stats.binomtest(int(10 * value), 10).proportion_ci(0.95, method="exact")
    assert (found.low, found.high) == (pytest.approx(exact.low), pytest.approx(exact.high))


def test_means_equal_up_to_rounding_get_the_exact_interval():
    """A third of 0.1 + 0.1 + 0.1 is not 0.1 in floating point."""
    found = mean_reward({"a": [0.1] * 3, "b": [0.1]})
    assert (found.mean, found.stderr) == (pytest.approx(0.1), 0.0)
    assert found.low is not None and found.high is not None and found.high - found.low > 0.5


def test_equal_unbounded_rewards_have_no_interval():
    found = mean_reward({"a": [7.0], "b": [7.0]})
    assert (found.mean, found.low, found.high) == (7.0, None, None)


def test_no_graded_attempt_gives_no_mean():
    found = mean_reward({"a": []})
    assert (found.mean, found.tasks, found.attempts, str(found)) == (None, 0, 0, "none")


def test_bootstrap_is_reproducible_and_close_to_t():
    rng = np.random.default_rng(1)
    rewards = {str(task): [float(value)] for task, value in enumerate(rng.random(40))}
    found = mean_reward(rewards, kind="bootstrap", seed=3)
    assert found == mean_reward(rewards, kind="bootstrap", seed=3)
    by_t = mean_reward(rewards)
    assert found.low is not None and by_t.low is not None
    assert abs(found.low - by_t.low) < 0.02


@pytest.mark.parametrize(
    "setting", [Setting(20, 4, 1.0, 1.0), Setting(32, 5, 0.5, 1.5), Setting(50, 1, 0.5, 0.5)], ids=str
)
def test_coverage_of_95_percent_intervals(setting: Setting):
    # 1500 evaluations: a standard error of 0.6 %. benchmarks/interval_coverage.py has more settings.
    assert 0.93 <= coverage(setting, 1500, seed=7) <= 0.97


def test_interval_over_trials_fails_the_coverage_test():
    """An interval that treats attempts as independent has far too low coverage in the simulation."""
    setting, rng = Setting(32, 5, 0.5, 1.5), np.random.default_rng(7)

    def over_trials_holds(rewards: Rewards) -> bool:
        values = [value for own in rewards.values() for value in own]
        half = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
        return abs(float(np.mean(values)) - setting.truth) <= half

    draws = [attempted(rng.beta(setting.alpha, setting.beta, setting.tasks), setting.attempts, rng) for _ in range(500)]
    assert np.mean([over_trials_holds(rewards) for rewards in draws]) < 0.85


def test_task_means_skip_ungraded_tasks():
    assert task_means(REWARDS).tolist() == [pytest.approx(2 / 3), 0.0, 1.0, 0.75]
