import pytest

from harbortrainer.config.algo_table import LengthPenalty
from harbortrainer.engines.local.learner.training_sample import Sample, prune
from harbortrainer.engines.local.rollouts.group import TrialLength, group_advantages


def test_the_advantage_is_the_reward_minus_the_groups_mean():
    assert group_advantages([1.0, 0.0, 0.0, 0.5]) == pytest.approx([0.625, -0.375, -0.375, 0.125])


def test_there_is_no_division_by_the_standard_deviation():
    assert group_advantages([0.51, 0.49]) == pytest.approx([0.01, -0.01])


@pytest.mark.parametrize("rewards", [[], [0.7], [0.1] * 8, [1.0, 1.0, 1.0]])
def test_one_survivor_or_equal_rewards_teach_nothing_exactly(rewards):
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_a_length_penalty_takes_a_share_of_the_mean_reward():
    lengths = [TrialLength(100, 40, 2), TrialLength(50, 80, 4)]
    advantages = group_advantages([1.0, 1.0], penalty=LengthPenalty(), lengths=lengths)
    scores = [1 - (0.25 * 1 + 0.1 * 0.5 + 0.1 * 0.5), 1 - (0.25 * 0.5 + 0.1 * 1 + 0.1 * 1)]
    mean = sum(scores) / 2
    assert advantages == pytest.approx([s - mean for s in scores])


def test_a_length_penalty_does_nothing_to_a_group_that_failed():
    lengths = [TrialLength(100, 40, 2), TrialLength(50, 80, 4)]
    assert group_advantages([0.0, 0.0], penalty=LengthPenalty(), lengths=lengths) == [0.0, 0.0]


def test_a_length_penalty_needs_lengths():
    with pytest.raises(ValueError, match="length"):
        group_advantages([0.0, 1.0], penalty=LengthPenalty(), lengths=None)


def test_only_samples_with_an_advantage_are_kept():
    samples = [Sample([1, 2], [False, True], [0.0, -1.0], [0, 0], 1.0, a) for a in (0.5, 0.0, -0.0, -0.5)]
    assert [s.advantage for s in prune(samples)] == [0.5, -0.5]
