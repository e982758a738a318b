"""Refills: a group plays another rollout in place of a failed one."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from loop_fakes import rollout
from patience import HANG_S

from harbortrainer.config.algorithm_config import Algo
from harbortrainer.engines.local.rollouts.batch import Batches, OffPolicyBound, StepBatch
from harbortrainer.engines.local.rollouts.dispatcher import Dispatcher
from harbortrainer.engines.local.rollouts.group import MAX_SERVER_ENDS, Group
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.rollouts.schedule import Plan, Schedule
from harbortrainer.engines.local.step_metrics import batch_metrics
from harbortrainer.trials.outcome import Outcome

GROUP, BATCH, TOKENS = 8, 32, 100


@dataclass
class OneSource:
    """A source with groups of eight."""

    name: str = "s"
    group_size: int = GROUP
    algo: Algo = field(default_factory=Algo)

    def rollout(self, index: int) -> Rollout:
        return Rollout(source=self.name, outcome=Outcome.agent_error)


@dataclass
class ScriptedClient:
    """A client whose rollout number n is `script(n)`."""

    script: Callable[[int], Rollout]
    started: int = 0

    async def run_rollout(self, stream: OneSource, index: int, *, on_start: Callable[[], None]) -> Rollout:
        on_start()
        number, self.started = self.started, self.started + 1
        await asyncio.sleep(0)
        return self.script(number)


def make_dispatcher(script: Callable[[int], Rollout], *, bound: int = 0) -> Dispatcher:
    batches = Batches(batch_size=BATCH, bound=OffPolicyBound(bound))
    schedule = Schedule({"s": 1000}, {"s": 1.0}, seed=0)
    return Dispatcher({"s": OneSource()}, schedule, batches, ScriptedClient(script), step=0, last_step=None)  # ty: ignore[invalid-argument-type]


async def first_batch(script: Callable[[int], Rollout]) -> StepBatch:
    dispatcher = make_dispatcher(script)
    batch = await asyncio.wait_for(dispatcher.batch(1), HANG_S)
    await dispatcher.stop()
    return batch


async def test_failed_rollout_is_played_again():
    batch = await first_batch(lambda n: rollout(None if n == 3 else float(n % 2)))
    assert [len(group.trainable) for group in batch.groups] == [GROUP] * 4
    assert batch.refills == 1
    assert Counter(row.not_trained for row in batch.rows()) == {None: BATCH, "failed": 1}
    assert len({row.trial for row in batch.rows()}) == BATCH + 1


async def test_refills_are_bounded_per_group():
    """The first group's rollouts fail, and so do all of its refills."""
    batch = await first_batch(lambda n: rollout(None if n < GROUP or BATCH <= n < BATCH + 2 else float(n % 2)))
    lost = next(group for group in batch.arrived if not group.trains)
    assert (len(lost.rollouts), lost.refills, batch.refills) == (GROUP + 2, 2, 2)


async def test_refills_are_bounded_per_step():
    """Two rollouts of each of six groups fail, of which four fill the batch."""
    dispatcher = make_dispatcher(lambda n: rollout(None if n % GROUP < 3 and n < 48 else float(n % 2)), bound=0)
    batch = await asyncio.wait_for(dispatcher.batch(1), HANG_S)
    assert batch.refills == BATCH // 4
    assert dispatcher.refills == 0, "the next step has refills of its own"
    await dispatcher.stop()


async def test_batch_after_one_without_a_signal_has_refills_of_its_own():
    """The first batch has equal rewards; a rollout of each batch fails."""
    dispatcher = make_dispatcher(lambda n: rollout(None if n in (3, BATCH + 3) else float(n >= BATCH and n % 2)))
    dispatcher.refills = BATCH // 4
    batch = await asyncio.wait_for(dispatcher.batch(1), HANG_S)
    empty, full = batch.arrived[:4], batch.arrived[4:]
    assert (sum(group.refills for group in empty), sum(group.refills for group in full)) == (0, 1)
    await dispatcher.stop()


@pytest.mark.parametrize("outcome", [it for it in Outcome if it.retries == 0])
def test_policys_own_outcomes_are_not_played_again(outcome):
    group = Group(id="g", plan=Plan("s", 0), size=GROUP)
    group.start(0)
    assert not group.refill(rollout(None, outcome=outcome))


async def test_trials_of_a_server_that_ended_are_all_played_again():
    def script(number: int) -> Rollout:
        made = rollout(None if number < BATCH else float(number % 2))
        made.server_lost = number < BATCH
        return made

    batch = await first_batch(script)
    assert [len(group.trainable) for group in batch.groups] == [GROUP] * (BATCH // GROUP)
    assert batch_metrics(batch, OffPolicyBound(0), ["s"])["batch/refills"] == BATCH


def test_trial_is_not_played_again_for_ever():
    group = Group(id="g", plan=Plan("s", 0), size=GROUP)
    group.start(0)
    failed = rollout(None)
    failed.server_lost = True
    refilled = sum(group.refill(failed) for _ in range(10 * GROUP))
    assert refilled == MAX_SERVER_ENDS * GROUP + GROUP // 4


async def test_group_about_to_be_too_old_waits_for_no_refill():
    dispatcher = make_dispatcher(lambda n: rollout(1.0), bound=1)
    dispatcher.start_groups()
    group = next(iter(dispatcher.in_flight.values()))
    assert dispatcher.outstanding == 2 * BATCH
    assert dispatcher._may_refill(group)
    dispatcher.next_step = 2
    assert not dispatcher._may_refill(group), "batch 3 would be too late, and others fill batch 2"
    await dispatcher.stop()


async def test_cancelled_group_has_a_row_for_its_refill():
    dispatcher = make_dispatcher(lambda n: rollout(float(n % 2)))
    dispatcher.start_groups()
    group, failed = next(iter(dispatcher.in_flight.values())), rollout(None)
    assert group.refill(failed)
    group.begun = GROUP + 1
    group.add(failed)
    group.add(rollout(1.0))
    dispatcher.next_step = 2
    await dispatcher.new_version(1)
    counts = Counter(it.outcome for it in group.rollouts)
    assert counts == {Outcome.sandbox_error: 1, Outcome.completed: 1, Outcome.cancelled: GROUP - 1}
    await dispatcher.stop()


async def test_five_percent_failures_waste_under_two_percent():
    """Half of the failures are failed starts, the others sampled half of a trial's tokens."""
    rng = random.Random(0)

    def script(number: int) -> Rollout:
        failed = rng.random() < 0.05
        made = rollout(None if failed else float(number % 2), version=dispatcher.version)
        made.logged_tokens = rng.choice([0, TOKENS // 2]) if failed else TOKENS
        made.output_tokens = made.logged_tokens
        return made

    dispatcher, groups, wasted = make_dispatcher(script), list[Group](), list[float]()
    for step in range(1, 26):
        batch = await asyncio.wait_for(dispatcher.batch(step), HANG_S)
        groups += batch.groups
        wasted.append(batch_metrics(batch, OffPolicyBound(0), ["s"])["tokens/wasted"])
        await dispatcher.new_version(step)
    await dispatcher.stop()
    assert len(groups) == 100
    assert sum(len(group.trainable) == GROUP for group in groups) >= 95, "66 without refills"
    assert 0 < sum(wasted) / len(wasted) < 0.02
