"""The schedule: every task once an epoch, repeatable, and nothing lost by a stop."""

from harbortrainer.engines.local.rollouts.schedule import Plan, Schedule


def drawn(schedule: Schedule, count: int) -> list[Plan]:
    return [schedule.next() for _ in range(count)]


def test_every_task_comes_once_an_epoch_in_an_order_of_its_own():
    schedule = Schedule({"s": 8}, {"s": 1.0}, seed=1)
    first, second = ([plan.index for plan in drawn(schedule, 8)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second


def test_the_order_follows_from_the_seed():
    one, same, other = (Schedule({"s": 8}, {"s": 1.0}, seed=seed) for seed in (1, 1, 2))
    assert drawn(one, 20) == drawn(same, 20) != drawn(other, 20)


def test_sources_are_drawn_by_their_ratio():
    plans = drawn(Schedule({"a": 3, "b": 3}, {"a": 3.0, "b": 1.0}, seed=0), 400)
    share = sum(plan.source == "a" for plan in plans) / len(plans)
    assert 0.68 < share < 0.82


def test_a_resume_draws_lost_tasks_first_and_then_goes_on():
    schedule = Schedule({"s": 8}, {"s": 1.0}, seed=1)
    before = drawn(schedule, 5)
    state = schedule.state(outstanding=before[3:])
    after = drawn(schedule, 4)
    again = Schedule({"s": 8}, {"s": 1.0}, seed=1)
    again.restore(state)
    assert drawn(again, 6) == [*before[3:], *after]


def test_a_task_that_is_gone_is_not_drawn_again():
    schedule = Schedule({"s": 2}, {"s": 1.0}, seed=1)
    schedule.restore({"drawn": {"s": 0}, "again": [("s", 7), ("gone", 0)]})
    assert schedule.again == []
