"""The dispatcher: starts groups as the off-policy bound allows, and collects batches from those that finish.

It runs beside the learner: while one batch trains, the groups of the next are in flight. A group plays another
rollout in place of a failed one, within limits (`MAX_REFILL_PART`). Invariant: every started group is counted exactly
once, as waiting, lost, rejected, too old or cancelled.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from harbortrainer.engines.local.rollout_client import RolloutClient, TaskStream
from harbortrainer.engines.local.rollouts.batch import Batches, StepBatch
from harbortrainer.engines.local.rollouts.group import MAX_REFILL_PART, Group, rollout_count
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.rollouts.schedule import Plan, Schedule
from harbortrainer.errors import RunStoppedError
from harbortrainer.trials.outcome import Outcome


class Dispatcher:
    """Groups in flight, and the batches that they fill.

    Args:
        streams: The training sources by name.
        schedule: Draws the tasks.
        batches: Collects the finished groups.
        client: Runs the rollouts.
        step: The last finished step; also the policy version that samples.
        last_step: The run's last step; nothing is sampled for later ones.
        max_inflight: Most rollouts in flight, which the client enforces; None means no limit.
        on_rollout: Called with each rollout that ended and its group.
    """

    def __init__(
        self,
        streams: Mapping[str, TaskStream],
        schedule: Schedule,
        batches: Batches,
        client: RolloutClient,
        *,
        step: int,
        last_step: int | None,
        max_inflight: int | None = None,
        on_rollout: Callable[[Rollout, Group], None] = lambda rollout, group: None,
    ) -> None:
        self.streams, self.schedule, self.batches, self.client = streams, schedule, batches, client
        self.on_rollout, self.max_inflight = on_rollout, max_inflight
        self.version, self.next_step, self.last_step = step, step + 1, last_step
        self.paused = False
        self.refills = 0
        """Failed rollouts that were played again since the last batch, with or without a signal."""
        self.in_flight: dict[asyncio.Task[None], Group] = {}
        self.error: Exception | None = None
        self.no_task: RunStoppedError | None = None
        """Why no further task can be drawn now; a group that finishes may change that."""
        self.changed = asyncio.Event()

    @property
    def outstanding(self) -> int:
        """Number of rollouts in flight, or finished and not yet in a batch."""
        return rollout_count([*self.in_flight.values(), *self.batches.waiting])

    @property
    def collected(self) -> int:
        """Number of rollouts that ended and may be part of the next batch."""
        ended = sum(group.size - group.missing for group in self.in_flight.values())
        ended += rollout_count(self.batches.waiting)
        return min(ended, self.batches.batch_size)

    def plans(self) -> list[Plan]:
        """Return the tasks of every group that is in no finished step.

        These are groups in flight, groups that wait for a batch, and groups that arrived since the last batch.
        """
        return [group.plan for group in [*self.batches.arrived, *self.batches.waiting, *self.in_flight.values()]]

    def start_groups(self) -> None:
        """Start every group that may be started now."""
        self.no_task = None
        while not self.paused and self.error is None and self._may_start():
            try:
                plan = self.schedule.next()
            except RunStoppedError as error:
                self.no_task = error
                return
            stream = self.streams[plan.source]
            group = Group(uuid.uuid4().hex[:12], plan, stream.group_size, stream.algo)
            group.start(self.version)
            self.in_flight[asyncio.create_task(self._run_group(group, stream), name=f"group {group.id}")] = group

    def _may_start(self) -> bool:
        size = self.batches.batch_size
        expected_step = self.next_step + self.outstanding // size
        if self.last_step is not None and expected_step > self.last_step:
            return False
        return self.batches.bound.may_start(
            version=self.version,
            next_step=self.next_step,
            outstanding=self.outstanding,
            batch_size=size,
            room=self.max_inflight is None or sum(it.missing for it in self.in_flight.values()) < self.max_inflight,
        )

    async def _run_group(self, group: Group, stream: TaskStream) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(group.size):
                    tasks.create_task(self._run_rollout(group, stream))
            self.batches.add(group, admitted=self.schedule.on_result(group))
        except Exception as error:  # noqa: BLE001 - `batch` raises it
            self.error = self.error or (error.exceptions[0] if isinstance(error, ExceptionGroup) else error)
        finally:
            self._remove(group)
        self.start_groups()

    def _remove(self, group: Group) -> None:
        self.in_flight = {task: it for task, it in self.in_flight.items() if it is not group}
        self.changed.set()

    async def _run_rollout(self, group: Group, stream: TaskStream) -> None:
        """Run one rollout of a group, and another one in its place if it failed and may be refilled."""
        refilled = True
        while refilled:
            rollout = await self.client.run_rollout(stream, group.plan.index, on_start=group.begin)
            lost = rollout.server_lost and self.error is None  # every trial is, and none is at fault
            refilled = (lost or self._may_refill(group)) and group.refill(rollout)
            self.refills += refilled and not lost
            group.add(rollout)
            self.on_rollout(rollout, group)
            self.changed.set()

    def _may_refill(self, group: Group) -> bool:
        """Whether a failed rollout of a group may be played again now.

        A group in its last step before it is too old does not wait for another rollout while others can fill the batch.
        """
        size = self.batches.batch_size
        last_chance = self.batches.bound.too_old(group.version, self.next_step + 1)
        if last_chance and self.outstanding - group.size >= size:
            return False
        return self.error is None and self.refills < max(1, size // MAX_REFILL_PART)

    async def batch(self, step: int, on_progress: Callable[[int], None] = lambda done: None) -> StepBatch:
        """Wait until enough groups have finished, and return the batch of a step.

        Args:
            step: The step; the policy version that it trains is the one before.
            on_progress: Called with the number of rollouts collected for the batch.

        Raises:
            RunStoppedError: The groups give nothing to learn from.
            ProofError: Tokens and log-probabilities do not belong together.
        """
        while True:
            self.changed.clear()
            if self.error is not None:
                raise self.error
            batch = self.batches.cut(step) if self.batches.ready(step) else None
            self.refills = self.refills if batch is None else 0
            if batch is not None and batch.samples:
                self.next_step = step + 1
                self.start_groups()
                return batch
            self.start_groups()
            on_progress(self.collected)
            if self.no_task is not None and not self.in_flight and not self.batches.ready(step):
                raise self.no_task
            if batch is None:
                await self.changed.wait()

    async def new_version(self, version: int) -> None:
        """Switch to a new policy version: cancel groups that have become too old, and start others."""
        self.version = version
        bound = self.batches.bound
        await self._cancel([task for task, it in self.in_flight.items() if bound.too_old(it.version, self.next_step)])
        self.start_groups()

    async def _cancel(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        groups = {task: self.in_flight[task] for task in tasks}
        for task in groups:
            task.cancel()
        await asyncio.gather(*groups, return_exceptions=True)
        for group in groups.values():
            self._remove(group)
            empty = self.streams[group.plan.source].rollout(group.plan.index)
            # A rollout that waited for a free slot was no trial, and has no row.
            group.rollouts += [replace(empty, outcome=Outcome.cancelled) for _ in range(group.running)]
            self.batches.drop(group)

    async def stop(self) -> None:
        """Cancel everything in flight."""
        self.paused = True
        await self._cancel(list(self.in_flight))
