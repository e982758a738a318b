"""Batches: what is cut, what is dropped, when a run is stopped."""

import pytest
from loop_fakes import group_of

from harbortrainer.engines.local.rollouts.batch import MAX_EMPTY_BATCHES, MAX_LOST_BATCHES, Batches, OffPolicyBound
from harbortrainer.errors import RunStoppedError
from harbortrainer.trials.outcome import Outcome


def batches(size: int = 4, bound: int = 1) -> Batches:
    return Batches(batch_size=size, bound=OffPolicyBound(bound))


def test_a_batch_is_cut_from_whole_groups_in_the_order_they_finished():
    it = batches()
    for name in ("a", "b", "c"):
        it.add(group_of([1.0, 0.0], name=name))
    assert it.ready(step=1)
    assert [group.id for group in it.cut(1).groups] == ["a", "b"]
    assert [group.id for group in it.waiting] == ["c"]


def test_a_lost_group_does_not_fill_a_batch_but_is_counted_as_arrived():
    it = batches()
    it.add(group_of([1.0, 0.0]))
    it.add(group_of([None, None]))
    assert not it.ready(step=1)
    it.add(group_of([1.0, 0.0]))
    batch = it.cut(1)
    assert len(batch.samples) == 4
    assert [r.outcome for r in batch.rollouts].count(Outcome.sandbox_error) == 2


def test_a_group_that_grew_too_old_is_dropped_and_counted():
    it = batches(bound=1)
    it.add(group_of([1.0, 0.0], version=0))
    it.add(group_of([1.0, 0.0], version=2))
    it.add(group_of([1.0, 0.0], version=2))
    assert it.ready(step=3)
    batch = it.cut(3)
    assert batch.dropped == 2
    assert [group.version for group in batch.groups] == [2, 2]


def test_rollouts_of_empty_batches_are_reported_with_the_next_step():
    it = batches(size=2)
    it.add(group_of([1.0, 1.0]))
    assert it.cut(1).samples == []
    it.add(group_of([1.0, 0.0]))
    batch = it.cut(1)
    assert len(batch.rollouts) == 4
    assert batch.empty_batches == 1


def test_ten_batches_without_a_signal_stop_the_run_and_say_on_which_side_the_tasks_are():
    it = batches(size=2)
    for _ in range(MAX_EMPTY_BATCHES - 1):
        it.add(group_of([0.0, 0.0]))
        it.cut(1)
    it.add(group_of([0.0, 0.0]))
    with pytest.raises(RunStoppedError, match=r"all rewards were equal \(mean 0\.00\), so the tasks are too hard"):
        it.cut(1)


def test_trials_that_all_fail_stop_the_run_and_name_the_cause():
    it = batches(size=2)
    for _ in range(MAX_LOST_BATCHES - 1):
        it.add(group_of([None, None]))
    with pytest.raises(RunStoppedError, match=r"6 of them sandbox_error .*no such namespace.*nothing was trained"):
        it.add(group_of([None, None]))


def test_one_good_group_starts_the_count_of_lost_trials_again():
    it = batches(size=2)
    for _ in range(2 * MAX_LOST_BATCHES):
        it.add(group_of([None, None]))
        it.add(group_of([1.0, 0.0]))
