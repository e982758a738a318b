"""The off-policy bound: which groups may train, and when groups may start."""

import pytest

from harbortrainer.engines.local.rollouts.batch import OffPolicyBound


def test_staleness_counts_versions_between_sampling_and_training():
    assert OffPolicyBound(8).staleness(oldest=3, step=4) == 0
    assert OffPolicyBound(8).staleness(oldest=3, step=6) == 2


@pytest.mark.parametrize(("oldest", "too_old"), [(5, False), (4, False), (3, True)])
def test_group_beyond_bound_is_too_old(oldest, too_old):
    assert OffPolicyBound(1).too_old(oldest=oldest, step=6) is too_old


def may_start(bound, **state):
    return OffPolicyBound(bound).may_start(batch_size=8, **state)


def test_next_batch_is_sampled_during_training():
    # Batch 3 is in training, version 2 samples, and batch 4 is being collected.
    assert may_start(1, version=2, next_step=4, outstanding=0)
    assert may_start(1, version=2, next_step=4, outstanding=7)


def test_at_most_one_batch_is_sampled_ahead():
    assert not may_start(8, version=2, next_step=4, outstanding=8)


def test_free_room_is_filled_while_the_loop_waits():
    # Version 3 is the newest and batch 4 is being collected, so no step is in training.
    waiting = {"version": 3, "next_step": 4, "room": True}
    assert may_start(8, outstanding=39, **waiting)
    assert not may_start(8, outstanding=40, **waiting), "half of the bound: slow trials are overtaken"
    assert not may_start(8, outstanding=16, **waiting | {"room": False})
    assert not may_start(8, outstanding=8, **waiting | {"version": 2})


def test_on_policy_waits_for_update():
    assert not may_start(0, version=2, next_step=4, outstanding=0)
    assert may_start(0, version=3, next_step=4, outstanding=0)
    assert not may_start(0, version=3, next_step=4, outstanding=8)


def test_stragglers_do_not_leave_the_sampler_idle():
    # Batch 4 waits for its last groups and version 3 is the newest, so groups of batch 5 may start.
    assert may_start(1, version=3, next_step=4, outstanding=8)
