"""The scalar that trains."""

import math

import pytest

from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import TrialRecord
from harbortrainer.trials.rewards import only_finite, scalar


def test_the_key_reward_wins():
    assert scalar({"reward": 0.25, "style": 1.0}) == 0.25


def test_without_it_the_mean_counts():
    assert scalar({"speed": 1.0, "style": 0.5}) == 0.75


@pytest.mark.parametrize("rewards", [None, {}, {"reward": math.nan}, {"reward": 1.0, "style": -math.inf}])
def test_no_finite_reward_is_never_a_zero(rewards):
    assert scalar(rewards) is None


def test_what_is_not_finite_is_not_kept_since_json_has_no_word_for_it():
    assert only_finite({"reward": math.nan, "style": 1}) == {"style": 1.0}
    assert only_finite(None) is None


def test_a_record_that_trains_has_a_reward_and_no_other_has_one():
    with pytest.raises(ValueError, match="completed with reward None"):
        TrialRecord(outcome=Outcome.completed, task="t")
    with pytest.raises(ValueError, match=r"model_error with reward 0\.0"):
        TrialRecord(outcome=Outcome.model_error, task="t", reward=0.0)


def test_a_record_survives_the_wire():
    record = TrialRecord(outcome=Outcome.agent_timeout, task="t", rewards={"reward": 1.0}, reward=1.0)
    assert TrialRecord.model_validate(record.to_json()) == record
