"""Advantages: rewards minus the mean of their group, with an optional length penalty."""

import pytest

from harbortrainer.config.algorithm_config import LengthPenalty
from harbortrainer.engines.local.learner.training_sample import Sample, prune
from harbortrainer.engines.local.rollouts.advantage import TrialLength, group_advantages


def test_advantage_is_reward_minus_group_mean():
    assert group_advantages([1.0, 0.0, 0.0, 0.5]) == pytest.approx([0.625, -0.375, -0.375, 0.125])


def test_does_not_divide_by_standard_deviation():
    assert group_advantages([0.51, 0.49]) == pytest.approx([0.01, -0.01])


@pytest.mark.parametrize("rewards", [[], [0.7], [0.1] * 8, [1.0, 1.0, 1.0]])
def test_single_or_equal_rewards_give_exactly_0(rewards):
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_length_penalty_subtracts_share_of_mean_reward():
    lengths = [TrialLength(100, 40, 2), TrialLength(50, 80, 4)]
    advantages = group_advantages([1.0, 1.0], penalty=LengthPenalty(), lengths=lengths)
    scores = [1 - (0.25 * 1 + 0.1 * 0.5 + 0.1 * 0.5), 1 - (0.25 * 0.5 + 0.1 * 1 + 0.1 * 1)]
    mean = sum(scores) / 2
    assert advantages == pytest.approx([s - mean for s in scores])


def test_length_penalty_is_0_for_reward_0():
    lengths = [TrialLength(100, 40, 2), TrialLength(50, 80, 4)]
    assert group_advantages([0.0, 0.0], penalty=LengthPenalty(), lengths=lengths) == [0.0, 0.0]


def test_length_penalty_requires_lengths():
    with pytest.raises(ValueError, match="length"):
        group_advantages([0.0, 1.0], penalty=LengthPenalty(), lengths=None)


def test_prune_keeps_samples_with_advantage():
    samples = [Sample([1, 2], [False, True], [0.0, -1.0], [0, 0], 1.0, a) for a in (0.5, 0.0, -0.0, -0.5)]
    assert [s.advantage for s in prune(samples)] == [0.5, -0.5]
