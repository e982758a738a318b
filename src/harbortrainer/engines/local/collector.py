"""Collects batches: starts groups as the off-policy bound allows, and gathers what they bring.

It runs beside the learner: while one batch trains, the groups of the next are in flight. Invariant: a group that was
started is counted exactly once, as waiting, lost, too old or cancelled.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping

from harbortrainer.engines.local.batches import Batch, Batches
from harbortrainer.engines.local.groups import Group, sizes
from harbortrainer.engines.local.player import Player
from harbortrainer.engines.local.rollout import Rollout
from harbortrainer.engines.local.schedule import Plan, Schedule
from harbortrainer.engines.local.source import Source
from harbortrainer.trials.outcome import Outcome


class Collector:
    """Groups in flight.

    Args:
        sources: The training sources by name.
        step: The last finished step; also the policy version that samples.
        last_step: The run's last step; nothing is sampled for later ones.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        schedule: Schedule,
        batches: Batches,
        player: Player,
        *,
        step: int,
        last_step: int | None,
    ) -> None:
        self.sources, self.schedule, self.batches, self.player = sources, schedule, batches, player
        self.version, self.next_step, self.last_step = step, step + 1, last_step
        self.paused = False
        self.in_flight: dict[str, Group] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.error: BaseException | None = None
        self.changed = asyncio.Event()

    @property
    def outstanding(self) -> int:
        """Rollouts in flight, or finished and not yet in a batch."""
        return sizes([*self.in_flight.values(), *self.batches.waiting])

    @property
    def collected(self) -> int:
        """Rollouts that ended and may be part of the next batch."""
        arrived = sum(len(group.rollouts) for group in self.in_flight.values()) + sizes(self.batches.waiting)
        return min(arrived, self.batches.batch_size)

    def plans(self) -> list[Plan]:
        """The tasks of every group that has not trained."""
        return [group.plan for group in [*self.batches.waiting, *self.in_flight.values()]]

    def fill(self) -> None:
        """Start every group that may be started now."""
        while not self.paused and self.error is None and self._may_start():
            plan = self.schedule.next()
            source = self.sources[plan.source]
            group = Group(uuid.uuid4().hex[:12], plan, source.group_size, source.penalty)
            group.start(self.version)
            self.in_flight[group.id] = group
            self.tasks[group.id] = asyncio.create_task(self._play(group), name=f"group {group.id}")

    def _may_start(self) -> bool:
        size = self.batches.batch_size
        lands_in = self.next_step + self.outstanding // size
        if self.last_step is not None and lands_in > self.last_step:
            return False
        return self.batches.bound.may_start(
            version=self.version, next_step=self.next_step, outstanding=self.outstanding, batch_size=size
        )

    async def _play(self, group: Group) -> None:
        """Play the rollouts of a group, and put it where it belongs."""
        source = self.sources[group.plan.source]
        try:
            async with asyncio.TaskGroup() as together:
                for _ in range(group.size):
                    together.create_task(self._rollout(group, source))
            self.batches.add(group)
        except BaseExceptionGroup as errors:
            self.error = self.error or errors.exceptions[0]
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for a batch
            self.error = self.error or error
        finally:
            self.in_flight.pop(group.id, None)
            self.tasks.pop(group.id, None)
            self.changed.set()
        self.fill()

    async def _rollout(self, group: Group, source: Source) -> None:
        group.add(await self.player.play(source, group.plan.index))
        self.changed.set()

    async def batch(self, step: int, report: Callable[[int], None] = lambda done: None) -> Batch:
        """The batch of a step: waits until enough groups have finished.

        Args:
            step: Which step; the policy version it trains is the one before.
            report: Told how many rollouts of the batch there are.

        Raises:
            RunStoppedError: Nothing can be learned from what comes back.
            ProofError: Tokens and log-probabilities do not belong together.
        """
        while True:
            self.changed.clear()
            if self.error is not None:
                raise self.error
            batch = self.batches.cut(step) if self.batches.ready(step) else None
            if batch is not None and batch.samples:
                self.next_step = step + 1
                self.fill()
                return batch
            self.fill()
            report(self.collected)
            if batch is None:
                await self.changed.wait()

    async def new_version(self, version: int) -> None:
        """The policy changed: groups that can no longer train are cancelled, others may start."""
        self.version = version
        old = [
            group.id for group in self.in_flight.values() if self.batches.bound.too_old(group.version, self.next_step)
        ]
        await self._cancel(old)
        self.fill()

    async def _cancel(self, ids: list[str]) -> None:
        groups = [self.in_flight[group_id] for group_id in ids]
        tasks = [self.tasks[group_id] for group_id in ids]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for group in groups:
            missing = group.size - len(group.rollouts)
            blank = [Rollout(source=group.plan.source, outcome=str(Outcome.cancelled)) for _ in range(missing)]
            self.batches.arrived += [*group.rollouts, *blank]
            self.batches.dropped += group.size

    async def stop(self) -> None:
        """Cancel everything in flight."""
        self.paused = True
        await self._cancel(list(self.tasks))
