"""The scalar that trains."""

import math

import pytest

from harbortrainer.trials.outcome import Outcome, scalar
from harbortrainer.trials.record import TrialRecord, only_finite


def test_the_key_reward_wins():
    assert scalar({"reward": 0.25, "style": 1.0}) == 0.25


def test_without_it_the_mean_counts():
    assert scalar({"speed": 1.0, "style": 0.5}) == 0.75


@pytest.mark.parametrize("rewards", [None, {}, {"reward": math.nan}, {"reward": 1.0, "style": -math.inf}])
def test_no_finite_reward_is_never_a_zero(rewards):
    assert scalar(rewards) is None


@pytest.mark.parametrize("value", [1e308, -1e308, 1_000_001, -1_000_001, 10**400])
def test_a_reward_beyond_the_bound_is_no_reward(value):
    assert scalar({"reward": value}) is None
    assert scalar({"speed": value, "style": value}) is None


def test_the_bound_is_the_users_and_is_for_what_trains():
    assert scalar({"reward": 1_000_000}) == 1e6
    assert scalar({"reward": 2e6}, bound=1e7) == 2e6
    assert scalar({"reward": 1.0, "nanoseconds": 3e12}) == 1.0


def test_what_is_not_finite_is_not_kept_since_json_has_no_word_for_it():
    assert only_finite({"reward": math.nan, "style": 1}) == {"style": 1.0}
    assert only_finite({"reward": 10**400}) == {}
    assert only_finite(None) is None


def test_a_record_that_trains_has_a_reward_and_no_other_has_one():
    with pytest.raises(ValueError, match="completed with reward None"):
        TrialRecord(outcome=Outcome.completed, task="t")
    with pytest.raises(ValueError, match=r"model_error with reward 0\.0"):
        TrialRecord(outcome=Outcome.model_error, task="t", reward=0.0)


def test_a_record_survives_the_wire():
    record = TrialRecord(outcome=Outcome.agent_timeout, task="t", rewards={"reward": 1.0}, reward=1.0)
    assert TrialRecord.model_validate(record.to_json()) == record


def test_the_mean_of_an_outcomes_metric_is_its_share():
    records = [
        TrialRecord(outcome=Outcome.completed, task="t", reward=1.0),
        TrialRecord(outcome="model_error", task="t"),
    ]
    written = [record.metrics() for record in records]
    for outcome in Outcome:
        share = sum(numbers[f"outcome_{outcome}"] for numbers in written) / len(written)
        assert share == sum(record.outcome is outcome for record in records) / 2
