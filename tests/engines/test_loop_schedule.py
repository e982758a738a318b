"""The schedule: every task once per epoch, repeatable, and complete after a resume."""

from harbortrainer.engines.local.rollouts.schedule import Plan, Schedule


def draw(schedule: Schedule, count: int) -> list[Plan]:
    return [schedule.next() for _ in range(count)]


def test_epoch_has_every_task_once_in_new_order():
    schedule = Schedule({"s": 8}, {"s": 1.0}, seed=1)
    first, second = ([plan.index for plan in draw(schedule, 8)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second


def test_order_depends_on_seed():
    first, same, other = (Schedule({"s": 8}, {"s": 1.0}, seed=seed) for seed in (1, 1, 2))
    assert draw(first, 20) == draw(same, 20) != draw(other, 20)


def test_sources_are_drawn_by_ratio():
    plans = draw(Schedule({"a": 3, "b": 3}, {"a": 3.0, "b": 1.0}, seed=0), 400)
    share = sum(plan.source == "a" for plan in plans) / len(plans)
    assert 0.68 < share < 0.82


def test_resume_draws_lost_tasks_first():
    schedule = Schedule({"s": 8}, {"s": 1.0}, seed=1)
    before = draw(schedule, 5)
    state = schedule.state(outstanding=before[3:])
    after = draw(schedule, 4)
    resumed = Schedule({"s": 8}, {"s": 1.0}, seed=1)
    resumed.restore(state)
    assert draw(resumed, 6) == [*before[3:], *after]


def test_removed_task_is_not_drawn():
    schedule = Schedule({"s": 2}, {"s": 1.0}, seed=1)
    schedule.restore({"drawn": {"s": 0}, "again": [("s", 7), ("gone", 0)]})
    assert schedule.again == []
