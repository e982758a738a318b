"""The dispatcher: when groups start, and how they end."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from loop_fakes import rollout
from patience import HANG_S

from harbortrainer.config.algorithm_config import Algo
from harbortrainer.engines.local.rollout_client import RolloutClient
from harbortrainer.engines.local.rollouts.batch import Batches, OffPolicyBound, StepBatch
from harbortrainer.engines.local.rollouts.dispatcher import Dispatcher
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.rollouts.schedule import Schedule
from harbortrainer.engines.local.sampler.completion_log import CompletionLog
from harbortrainer.errors import ProofError
from harbortrainer.trials.outcome import Outcome


@dataclass
class OneSource:
    """A source of tasks with groups of two."""

    name: str = "s"
    group_size: int = 2
    algo: Algo = field(default_factory=Algo)

    def rollout(self, index: int) -> Rollout:
        return Rollout(source=self.name, task=str(index), outcome=Outcome.agent_error)


@dataclass
class GatedClient:
    """A client whose rollouts end when permitted, with rewards 1 and 0 in turn."""

    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    version: int = 0
    started: int = 0
    ended: int = 0
    failing: bool = False

    async def run_rollout(self, stream: OneSource, index: int, *, on_start: Callable[[], None]) -> Rollout:
        on_start()
        self.started += 1
        version = self.version
        await self.permits.acquire()
        self.ended += 1
        return rollout(None if self.failing else float(self.ended % 2), version=version)


class ForgingClient(GatedClient):
    """A client whose rollouts fail the check of sampled tokens."""

    async def run_rollout(self, stream: OneSource, index: int, *, on_start: Callable[[], None]) -> Rollout:
        raise ProofError("not what the engine sampled")


def make_dispatcher(
    client: GatedClient | RolloutClient,
    *,
    bound: int = 1,
    last_step: int | None = None,
    max_inflight: int | None = None,
) -> Dispatcher:
    schedule = Schedule({"s": 4}, {"s": 1.0}, seed=0)
    batches = Batches(batch_size=4, bound=OffPolicyBound(bound))
    limits = {"step": 0, "last_step": last_step, "max_inflight": max_inflight}
    return Dispatcher({"s": OneSource()}, schedule, batches, client, **limits)  # ty: ignore[invalid-argument-type]


def end_rollouts(client: GatedClient, rollouts: int) -> None:
    """Permit this number of rollouts to end."""
    for _ in range(rollouts):
        client.permits.release()


async def run_ready_tasks() -> None:
    """Run every task until it waits."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_samples_one_batch_ahead():
    client = GatedClient()
    dispatcher = make_dispatcher(client)
    dispatcher.start_groups()
    await run_ready_tasks()
    assert client.started == 8
    await dispatcher.stop()


async def test_samples_next_batch_during_training():
    client = GatedClient()
    dispatcher = make_dispatcher(client)
    end_rollouts(client, 4)
    batch = await asyncio.wait_for(dispatcher.batch(1), HANG_S)
    await run_ready_tasks()
    assert len(batch.groups) == 2
    # Batch 1 is in training: batch 2 is in flight, batch 3 waits for version 1.
    assert (dispatcher.outstanding, client.started) == (4, 8)
    await dispatcher.new_version(1)
    await run_ready_tasks()
    assert (dispatcher.outstanding, client.started) == (8, 12)
    await dispatcher.stop()


@pytest.mark.parametrize(
    ("max_inflight", "bound", "in_flight"),
    [(14, 8, 14), (6, 8, 8), (None, 8, 20), (100, 4, 12), (100, 1, 8), (100, 0, 4)],
)
async def test_fills_max_inflight_within_half_of_off_policy_bound(max_inflight, bound, in_flight):
    """At least one batch of four is sampled ahead; the client makes trials beyond `max_inflight` wait."""
    client = GatedClient()
    dispatcher = make_dispatcher(client, bound=bound, max_inflight=max_inflight)
    dispatcher.start_groups()
    await run_ready_tasks()
    assert client.started == dispatcher.outstanding == in_flight
    await dispatcher.stop()


async def test_fills_max_inflight_only_while_the_loop_waits():
    client = GatedClient()
    dispatcher = make_dispatcher(client, bound=8, max_inflight=12)
    end_rollouts(client, 4)
    await asyncio.wait_for(dispatcher.batch(1), HANG_S)
    await run_ready_tasks()
    running = sum(group.missing for group in dispatcher.in_flight.values())
    end_rollouts(client, 2)
    await run_ready_tasks()
    assert sum(group.missing for group in dispatcher.in_flight.values()) == running - 2, "step 1 is in training"
    await dispatcher.new_version(1)
    await run_ready_tasks()
    assert sum(group.missing for group in dispatcher.in_flight.values()) == 12
    await dispatcher.stop()


async def test_on_policy_starts_no_group_before_update():
    client = GatedClient()
    dispatcher = make_dispatcher(client, bound=0)
    end_rollouts(client, 4)
    await asyncio.wait_for(dispatcher.batch(1), HANG_S)
    await run_ready_tasks()
    assert dispatcher.outstanding == 0
    await dispatcher.new_version(1)
    assert dispatcher.outstanding == 4
    await dispatcher.stop()


async def test_samples_nothing_for_steps_after_last():
    client = GatedClient()
    dispatcher = make_dispatcher(client, last_step=1)
    dispatcher.start_groups()
    await run_ready_tasks()
    assert client.started == 4
    await dispatcher.stop()


async def test_replaces_lost_group():
    client = GatedClient(failing=True)
    dispatcher = make_dispatcher(client, bound=0)
    end_rollouts(client, 3)
    dispatcher.start_groups()
    await run_ready_tasks()
    client.failing = False
    end_rollouts(client, 4)
    batch = await asyncio.wait_for(dispatcher.batch(1), HANG_S)
    assert len(batch.groups) == 2
    assert [r.outcome for r in batch.rollouts].count(Outcome.sandbox_error) == 3, "two, and a refill"
    await dispatcher.stop()


async def test_cancels_old_group_in_flight():
    client = GatedClient()
    dispatcher = make_dispatcher(client, bound=0)
    dispatcher.start_groups()
    await run_ready_tasks()
    dispatcher.next_step = 2
    await dispatcher.new_version(1)
    dropped = dispatcher.batches.arrived
    assert [group.too_old for group in dropped] == [True, True]
    assert [r.outcome for group in dropped for r in group.rollouts] == ["cancelled"] * 4
    assert {group.version for group in dispatcher.in_flight.values()} == {1}
    await dispatcher.stop()


class HangingSource(OneSource):
    """A source whose trials never end."""

    async def run(self, index: int, *, seed: int | None = None) -> None:
        await asyncio.Event().wait()


async def test_cancelled_rollout_that_never_started_is_no_trial():
    """Two groups of two share three slots."""
    client = RolloutClient(CompletionLog(), seq_len=8, max_inflight=3)
    dispatcher = make_dispatcher(client, bound=0)
    dispatcher.streams = {"s": HangingSource()}  # ty: ignore[invalid-assignment]
    dispatcher.start_groups()
    await run_ready_tasks()
    assert (len(dispatcher.in_flight), len(client.in_flight)) == (2, 3)
    dispatcher.next_step = 2
    await dispatcher.new_version(1)
    batch = StepBatch(2, [], [], arrived=dispatcher.batches.arrived)
    assert [row.outcome for row in batch.rows()] == ["cancelled"] * 3
    assert batch.dropped == 3
    await dispatcher.stop()


async def test_check_error_reaches_batch_caller():
    dispatcher = make_dispatcher(ForgingClient())
    with pytest.raises(ProofError):
        await asyncio.wait_for(dispatcher.batch(1), HANG_S)
    await dispatcher.stop()


async def test_stop_ends_all_tasks():
    dispatcher = make_dispatcher(GatedClient())
    dispatcher.start_groups()
    await run_ready_tasks()
    await dispatcher.stop()
    assert dispatcher.in_flight == {}
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_plans_are_tasks_that_resume_repeats():
    client = GatedClient()
    dispatcher = make_dispatcher(client)
    dispatcher.start_groups()
    await run_ready_tasks()
    plans = dispatcher.plans()
    assert len(plans) == 4
    assert dispatcher.schedule.state(plans)["again"] == plans
    await dispatcher.stop()


async def test_plans_include_groups_lost_since_last_batch():
    """Their rows are written with the next step. A run killed before that would otherwise lose them."""
    client = GatedClient(failing=True)
    dispatcher = make_dispatcher(client)
    dispatcher.start_groups()
    await run_ready_tasks()
    dispatcher.refills = 1  # none is left in this step
    end_rollouts(client, 2)
    await run_ready_tasks()
    (lost,) = dispatcher.batches.arrived
    assert lost.plan in dispatcher.plans()
    assert len(dispatcher.plans()) == sum(dispatcher.schedule.drawn.values()), "every drawn task"
    await dispatcher.stop()
