"""Groups: states, trainable rollouts, advantages, and the effect of failures."""

import pytest
from loop_fakes import group_of, rollout

from harbortrainer.config.algorithm_config import Algo, LengthPenalty
from harbortrainer.engines.local.rollouts.group import Group, GroupState
from harbortrainer.engines.local.rollouts.rollout import outcome_shares
from harbortrainer.engines.local.rollouts.schedule import Plan
from harbortrainer.trials.outcome import Outcome


def test_group_state_changes():
    group = Group(id="g", plan=Plan("s", 0), size=1)
    assert group.state is GroupState.PLANNED
    group.start(version=3)
    assert group.state is GroupState.IN_FLIGHT
    group.add(rollout(1.0))
    assert group.state is GroupState.FINISHED


def test_group_refuses_rollout_unless_in_flight():
    group = Group(id="g", plan=Plan("s", 0), size=1)
    with pytest.raises(ValueError, match="planned"):
        group.add(rollout(1.0))
    group.start(version=0)
    group.add(rollout(1.0))
    with pytest.raises(ValueError, match="finished"):
        group.add(rollout(1.0))


def test_failure_is_not_in_mean():
    group = group_of([1.0, 0.0, None])
    assert group.trains
    assert group.advantages() == [0.5, -0.5]
    assert {sample.advantage for sample in group.samples()} == {0.5, -0.5}


@pytest.mark.parametrize("rewards", [[1.0, None, None], [None, None]])
def test_group_needs_two_trainable_rollouts(rewards):
    assert not group_of(rewards).trains


def test_equal_rewards_give_no_sample():
    assert group_of([1.0, 1.0, 1.0]).samples() == []


def test_rollout_without_tokens_is_not_trainable():
    empty = rollout(1.0)
    empty.samples = []
    assert not empty.trainable


def test_oldest_version_of_group():
    assert group_of([1.0, 0.0], versions=[4, 2], version=4).oldest_version == 2


def test_outcome_shares_add_up():
    shares = outcome_shares([rollout(1.0), rollout(None), rollout(None), rollout(0.0)])
    assert shares.keys() == set(Outcome)
    assert {name: share for name, share in shares.items() if share} == {"completed": 0.5, "sandbox_error": 0.5}


def test_length_penalty_prefers_shorter_trial():
    group = group_of([1.0, 1.0])
    group.rollouts[0].total_output_tokens, group.rollouts[1].total_output_tokens = 1, 2
    group.algo = Algo(length_penalty=LengthPenalty())
    short, long = group.advantages()
    assert short > 0 > long
