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


def test_length_weighted_baseline_weights_trials_by_sampled_tokens():
    lengths = [TrialLength(99, 99, 9, tokens) for tokens in (10, 20, 70)]
    advantages = group_advantages([1.0, 0.5, 0.0], lengths=lengths, length_weighted=True)
    assert advantages == pytest.approx([0.8, 0.3, -0.2])  # the baseline is (10 * 1 + 20 * 0.5) / 100
    assert sum(a * x.sampled_tokens for a, x in zip(advantages, lengths, strict=True)) == pytest.approx(0.0)


def test_length_weighted_baseline_follows_the_length_penalty():
    lengths = [TrialLength(100, 0, 1, 30), TrialLength(50, 0, 1, 10)]
    penalty = LengthPenalty(num_output_tokens_weight=0.5, num_input_tokens_weight=0.0, num_turns_weight=0.0)
    advantages = group_advantages([1.0, 0.0], penalty=penalty, lengths=lengths, length_weighted=True)
    scores = [1.0 - 0.5 * 0.5 * 1.0, 0.0 - 0.5 * 0.5 * 0.5]
    baseline = (30 * scores[0] + 10 * scores[1]) / 40
    assert advantages == pytest.approx([score - baseline for score in scores])


def test_length_weighted_baseline_of_equal_rewards_is_exactly_0():
    lengths = [TrialLength(1, 1, 1, tokens) for tokens in (3, 7, 11)]
    assert group_advantages([0.1] * 3, lengths=lengths, length_weighted=True) == [0.0] * 3


def test_length_penalty_requires_lengths():
    with pytest.raises(ValueError, match="length"):
        group_advantages([0.0, 1.0], penalty=LengthPenalty(), lengths=None)
    with pytest.raises(ValueError, match="length"):
        group_advantages([0.0, 1.0], lengths=[TrialLength(1, 1, 1, 1)], length_weighted=True)


def test_prune_keeps_samples_with_advantage():
    samples = [Sample([1, 2], [False, True], [0.0, -1.0], [0, 0], 1.0, a) for a in (0.5, 0.0, -0.0, -0.5)]
    assert [s.advantage for s in prune(samples)] == [0.5, -0.5]


def test_rewards_that_cancel_out_have_no_advantage_over_their_mean():
    rewards = [0.1, 0.2, -0.3]
    assert 0.0 < sum(rewards) / 3 < 1e-15, "the float mean is not exactly 0"
    assert group_advantages(rewards, normalized=True) == [0.0] * 3
    assert group_advantages([1.0, 0.0], normalized=True) == [1.0, -1.0]
