"""The scalar reward and its place in the record."""

import math

import pytest

from harbortrainer.trials.outcome import Outcome, scalar_reward
from harbortrainer.trials.record import TrialRecord, only_finite


def test_key_reward_takes_precedence():
    assert scalar_reward({"reward": 0.25, "style": 1.0}) == 0.25


def test_mean_of_values_without_key_reward():
    assert scalar_reward({"speed": 1.0, "style": 0.5}) == 0.75


def test_reward_key_is_taken_and_never_replaced_by_another():
    rewards = {"reward": 1.0, "score": 0.25, "chars": 5000.0}
    assert scalar_reward(rewards, key="score") == 0.25
    assert scalar_reward(rewards, key="accuracy") is None


@pytest.mark.parametrize("rewards", [None, {}, {"reward": math.nan}, {"reward": 1.0, "style": -math.inf}])
def test_missing_or_nonfinite_reward_is_none(rewards):
    assert scalar_reward(rewards) is None


@pytest.mark.parametrize("value", [1e308, -1e308, 1_000_001, -1_000_001, 10**400])
def test_reward_beyond_bound_is_none(value):
    assert scalar_reward({"reward": value}) is None
    assert scalar_reward({"speed": value, "style": value}) is None


def test_bound_is_configurable_and_applies_to_scalar_only():
    assert scalar_reward({"reward": 1_000_000}) == 1e6
    assert scalar_reward({"reward": 2e6}, bound=1e7) == 2e6
    assert scalar_reward({"reward": 1.0, "nanoseconds": 3e12}) == 1.0


def test_nonfinite_rewards_are_dropped():
    assert only_finite({"reward": math.nan, "style": 1}) == {"style": 1.0}
    assert only_finite({"reward": 10**400}) == {}
    assert only_finite(None) is None


def test_record_has_reward_if_and_only_if_it_trains():
    with pytest.raises(ValueError, match="completed with reward None"):
        TrialRecord(outcome=Outcome.completed, task="t")
    with pytest.raises(ValueError, match=r"model_error with reward 0\.0"):
        TrialRecord(outcome=Outcome.model_error, task="t", reward=0.0)


def test_record_round_trips_as_json():
    record = TrialRecord(outcome=Outcome.agent_timeout, task="t", rewards={"reward": 1.0}, reward=1.0)
    assert TrialRecord.model_validate(record.to_json()) == record


def test_mean_of_outcome_metric_is_its_share():
    records = [
        TrialRecord(outcome=Outcome.completed, task="t", reward=1.0),
        TrialRecord(outcome="model_error", task="t"),
    ]
    written = [record.metrics() for record in records]
    for outcome in Outcome:
        share = sum(numbers[f"outcome_{outcome}"] for numbers in written) / len(written)
        assert share == sum(record.outcome is outcome for record in records) / 2
