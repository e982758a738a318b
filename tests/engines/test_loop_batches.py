"""Batches: whole groups, dropped groups, and when a run is stopped."""

import pytest
from loop_fakes import group_of

from harbortrainer.config.algorithm_config import Algo
from harbortrainer.engines.local.rollouts.batch import MAX_EMPTY_BATCHES, MAX_LOST_BATCHES, Batches, OffPolicyBound
from harbortrainer.engines.local.rollouts.group import Group
from harbortrainer.engines.local.step_metrics import headline
from harbortrainer.errors import RunStoppedError
from harbortrainer.trials.outcome import Outcome


def batches(size: int = 4, bound: int = 1, lines: list[str] | None = None) -> Batches:
    on_discard = (lambda text: None) if lines is None else lines.append
    return Batches(batch_size=size, bound=OffPolicyBound(bound), on_discard=on_discard)


def test_batch_has_whole_groups_in_finishing_order():
    collected = batches()
    for name in ("a", "b", "c"):
        collected.add(group_of([1.0, 0.0], name=name))
    assert collected.ready(step=1)
    assert [group.id for group in collected.cut(1).groups] == ["a", "b"]
    assert [group.id for group in collected.waiting] == ["c"]


def test_lost_group_arrives_without_filling_batch():
    collected = batches()
    collected.add(group_of([1.0, 0.0]))
    collected.add(group_of([None, None]))
    assert not collected.ready(step=1)
    collected.add(group_of([1.0, 0.0]))
    batch = collected.cut(1)
    assert len(batch.samples) == 4
    assert [r.outcome for r in batch.rollouts].count(Outcome.sandbox_error) == 2


def test_old_group_is_dropped_and_counted():
    collected = batches(bound=1)
    collected.add(group_of([1.0, 0.0], version=0))
    collected.add(group_of([1.0, 0.0], version=2))
    collected.add(group_of([1.0, 0.0], version=2))
    assert collected.ready(step=3)
    batch = collected.cut(3)
    assert batch.dropped == 2
    assert [group.version for group in batch.groups] == [2, 2]


def test_next_step_reports_rollouts_of_empty_batches():
    collected = batches(size=2)
    collected.add(group_of([1.0, 1.0]))
    assert collected.cut(1).samples == []
    collected.add(group_of([1.0, 0.0]))
    batch = collected.cut(1)
    assert len(batch.rollouts) == 4
    assert batch.empty_batches == 1


def test_unequal_rewards_without_signal_are_not_called_equal():
    """With max_rl a group whose mean is not above 0 has no signal."""
    lines: list[str] = []
    collected = batches(size=2, lines=lines)
    group = group_of([-1.0, 0.0])
    group.algo = Algo(type="max_rl")
    collected.add(group)
    assert collected.cut(1).samples == []
    assert "with max_rl, had a mean that is not above 0 (mean -0.50)" in lines[0]


@pytest.mark.parametrize(
    ("reward", "difficulty", "remedy"),
    [
        (0.0, "too hard", "sometimes, a larger group_size, or a [warmup] table"),
        (0.25, "too hard", "sometimes, or a larger group_size"),
        (1.0, "too easy", "sometimes, or a larger group_size"),
    ],
)
def test_ten_empty_batches_stop_run_with_difficulty(reward, difficulty, remedy):
    collected = batches(size=2)
    for _ in range(MAX_EMPTY_BATCHES - 1):
        collected.add(group_of([reward, reward]))
        collected.cut(1)
    collected.add(group_of([reward, reward]))
    with pytest.raises(RunStoppedError) as stopped:
        collected.cut(1)
    assert f"all rewards were equal (mean {reward:.2f}), so the tasks are {difficulty}" in stopped.value.what
    assert stopped.value.do == f"choose tasks that the policy solves {remedy}"


def test_failing_trials_stop_run_with_cause():
    collected = batches(size=2)
    for _ in range(MAX_LOST_BATCHES - 1):
        collected.add(group_of([None, None]))
    with pytest.raises(RunStoppedError, match=r"6 of them sandbox_error .*no such namespace.*nothing was trained"):
        collected.add(group_of([None, None]))


def unstarted(task: str, size: int = 2, turns: int = 0) -> Group:
    """Return a group of one task whose sandboxes did not start, or failed after some turns."""
    group = group_of([None] * size)
    for one in group.rollouts:
        one.task_key, one.turns = task, turns
    return group


def test_first_batch_without_sandbox_stops_run():
    collected = batches(size=4)
    collected.add(unstarted("a"))
    with pytest.raises(RunStoppedError, match=r"^no sandbox started in the first 4 trials: 4 of them sandbox_error \("):
        collected.add(unstarted("b"))


@pytest.mark.parametrize(
    "groups",
    [
        [group_of([1.0, 0.0]), unstarted("a"), unstarted("b")],
        [unstarted("a", turns=1), unstarted("b")],
        [unstarted("a"), unstarted("a")],
    ],
    ids=["a trial was graded before", "a sandbox failed later", "only one task was tried"],
)
def test_later_batch_without_sandbox_is_discarded(groups: list[Group]):
    collected = batches(size=4, lines=(lines := []))
    for group in groups:
        collected.add(group)
    assert len(lines) == 1 and "1 of at most 3 batches" in lines[0]


@pytest.mark.parametrize(
    ("rewards", "cause"),
    [([1.0, None], "2 of them sandbox_error (no such namespace)"), ([1.0], "4 of them completed")],
)
def test_graded_trials_of_lost_groups_are_no_cause(rewards: list[float | None], cause: str):
    collected = batches(size=4, lines=(lines := []))
    while not lines:
        collected.add(group_of(rewards))
    assert lines[0].startswith(f"discarded 4 trials: {cause}")


def test_each_discarded_batch_is_reported_with_reason():
    collected = batches(size=4, lines=(lines := []))
    for _ in range(2):
        collected.add(group_of([0.0, 0.0]))
        collected.add(group_of([1.0, 1.0]))
        assert collected.cut(1).samples == []
    assert lines == [
        f"discarded 4 trials: within every group all rewards were equal (mean 0.50); {n} of at most 10 batches in a row"
        for n in (1, 2)
    ]
    lines.clear()
    for _ in range(3):
        collected.add(group_of([None, None]))
    (line,) = lines
    assert line.startswith("discarded 4 trials: 4 of them sandbox_error (")
    assert line.endswith(f"; 1 of at most {MAX_LOST_BATCHES} batches in a row")


def test_step_line_has_reasons_of_untrained_trials():
    collected = batches(size=2)
    collected.add(group_of([None, None, None]))
    collected.add(group_of([1.0, 0.0, None]))
    batch = collected.cut(1)
    numbers = {"progress/rollouts": 6.0, "progress/trained": 2.0, "time/step": 1.0, "time/wait_for_rollouts": 0.0}
    assert "6 trials, 2 trained (4 failed)" in headline(1, 2, numbers, batch.untrained())


def test_good_group_resets_lost_count():
    collected = batches(size=2)
    for _ in range(2 * MAX_LOST_BATCHES):
        collected.add(group_of([None, None]))
        collected.add(group_of([1.0, 0.0]))
