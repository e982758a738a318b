"""pass@k and pass^k, compared with the enumeration of every choice of k among n attempts."""

from itertools import combinations

import pytest

from harbortrainer.estimates.interval import pass_at, pass_hat, repeated_passes


@pytest.mark.parametrize("n", range(1, 7))
def test_estimators_equal_enumeration_of_k_attempts(n: int):
    for solved in range(n + 1):
        attempts = [1] * solved + [0] * (n - solved)
        for k in range(1, n + 1):
            chosen = list(combinations(attempts, k))
            assert pass_at(n, solved, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
            assert pass_hat(n, solved, k) == pytest.approx(sum(map(all, chosen)) / len(chosen))


def test_repeated_passes_are_means_over_tasks():
    found = {p.name: p.estimate for p in repeated_passes({"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.0, 0.0]})}
    assert list(found) == ["pass@1", "pass@2", "pass^1", "pass^2"]
    assert [found[name].mean for name in found] == [0.5, pytest.approx(2 / 3), 0.5, pytest.approx(1 / 3)]


def test_tasks_with_fewer_than_k_attempts_are_excluded():
    found = {p.name: p.estimate for p in repeated_passes({"a": [1.0, 0.0, 0.0], "b": [1.0], "c": []})}
    assert (found["pass@1"].tasks, found["pass@2"].tasks, found["pass@3"].tasks) == (2, 1, 1)
    assert found["pass@3"].mean == 1.0


def test_partial_rewards_have_no_repeated_passes():
    assert repeated_passes({"a": [0.5, 1.0]}) == []
    assert repeated_passes({}) == []
