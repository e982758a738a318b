"""The training loop: collect a batch, train, update the sampler's weights, write the step to disk, evaluate.

While a batch trains, the groups of the next batch are in flight. Evaluations run before the first step, at every
interval and after the last step.

Invariant: a step is finished when its checkpoint is complete. Its rollouts and its line of metrics are on disk before
that. Policy version n is the result of n steps.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.local.evaluation import Evaluator
from harbortrainer.engines.local.protocols import LearnerProtocol, SamplerProtocol
from harbortrainer.engines.local.rollout_client import RolloutClient, TaskStream
from harbortrainer.engines.local.rollouts.batch import Batches, OffPolicyBound, StepBatch
from harbortrainer.engines.local.rollouts.dispatcher import Dispatcher
from harbortrainer.engines.local.rollouts.group import Group
from harbortrainer.engines.local.rollouts.reward_check import check_rewards
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.rollouts.schedule import Schedule
from harbortrainer.engines.local.rollouts.token_check import TokenCheck
from harbortrainer.engines.local.step_metrics import Stopwatch, batch_metrics, cost_metrics, headline
from harbortrainer.engines.local.weight_update import update_weights
from harbortrainer.runs.checkpoints import Progress, prune, save
from harbortrainer.runs.display import Display
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.transcript_files import TranscriptWriter
from harbortrainer.runs.trial_row import write_rows

if TYPE_CHECKING:
    from harbortrainer.engines.local.sampler.rescoring import Rescored


@dataclass(frozen=True, kw_only=True)
class LoopComponents:
    """Loaded models, connected sources and the display, for the loop."""

    sampler: SamplerProtocol
    learner: LearnerProtocol
    train: Mapping[str, TaskStream]
    """The training sources by name."""
    held_out: Mapping[str, TaskStream]
    """The evaluation sources by name."""
    display: Display
    usage: Callable[[], tuple[float, float, float]]
    """Returns the seconds and peak memory (MB) of all starts of the run, and the server restarts of this one."""


class TrainingLoop:
    """A run from its last finished step to its last step, inside one event loop.

    Args:
        config: The run.
        run: Its folder.
        components: The models, sources and display.
        progress: State of the run after its last finished step; replaced with every step.
    """

    def __init__(self, config: RunConfig, run: RunFolder, components: LoopComponents, progress: Progress) -> None:
        self.config, self.run, self.components, self.progress = config, run, components, progress
        settings = config.orchestrator
        self.bound = OffPolicyBound(settings.max_off_policy_steps)
        self.client = RolloutClient(
            components.sampler.completion_log, seq_len=config.seq_len, max_inflight=settings.concurrency.max_inflight
        )
        self.schedule = Schedule(
            {name: len(stream.tasks) for name, stream in components.train.items()},
            {name: stream.config.ratio for name, stream in components.train.items()},
            seed=config.seed,
            curricula={name: stream.curriculum for name, stream in components.train.items()},
        )
        if progress.schedule is not None:
            self.schedule.restore(progress.schedule)
        self.transcripts = TranscriptWriter(run.path, max_mb=config.transcripts_mb)
        self.dispatcher = Dispatcher(
            components.train,
            self.schedule,
            Batches(batch_size=settings.batch_size, bound=self.bound, on_discard=components.display.line),
            self.client,
            step=progress.step,
            last_step=config.max_steps,
            max_inflight=settings.concurrency.max_inflight,
            on_rollout=self._keep_transcript,
        )
        self.evaluator = Evaluator(config, run, components.held_out, self.client, self.transcripts, components.display)
        self.token_check = TokenCheck(
            lambda plan: components.train[plan.source].key_of(plan.index), seq_len=config.seq_len
        )
        self.watch = Stopwatch()
        self.rescored: list[Rescored] = []
        self.updating = asyncio.Lock()

    async def run_remaining_steps(self) -> None:
        """Run every remaining step and the evaluations."""
        try:
            await self._evaluate()
            with self.components.display.bar("steps", self.config.max_steps, plain=False) as bar:
                bar.set(self.progress.step)
                while not self._finished():
                    started = time.monotonic()
                    batch = await self._collect_batch()
                    async with self.updating:
                        await self._train(batch)
                        await self._update_weights(batch)
                        await self._finish_step(batch, time.monotonic() - started)
                    bar.set(self.progress.step)
                    await self._evaluate()
        finally:
            await self.dispatcher.stop()

    def _keep_transcript(self, rollout: Rollout, group: Group) -> None:
        self.transcripts.add(rollout.transcript, rollout.pending_row(kind="train", group=group.id))

    def _finished(self) -> bool:
        return self.config.max_steps is not None and self.progress.step >= self.config.max_steps

    async def _collect_batch(self) -> StepBatch:
        """Wait until enough groups have finished, and return the next step's batch."""
        step = self.progress.step + 1
        with (
            self.watch.timed("time/wait_for_rollouts"),
            self.components.display.bar(f"step {step}: sampling", self.config.orchestrator.batch_size) as bar,
        ):
            return await self.dispatcher.batch(step, bar.set)

    async def _train(self, batch: StepBatch) -> None:
        """Check the batch's tokens and rewards and train on it, which makes the learner's next version."""
        await asyncio.to_thread(self.token_check.check, batch.groups, batch.samples)
        await asyncio.to_thread(check_rewards, batch.groups, batch.samples)
        await self._rescore()
        rescored, self.rescored = self.rescored, []
        self.watch.metrics |= await asyncio.to_thread(self.components.learner.train, batch.samples, rescored)

    async def _update_weights(self, batch: StepBatch) -> None:
        """Load the new version into the sampler."""
        await self._rescore()  # samples since then train later, when the sampler no longer has their version
        with self.watch.timed("time/hand_over"):
            await asyncio.to_thread(update_weights, self.components.learner, self.components.sampler)
        await self.dispatcher.new_version(batch.step)

    async def _rescore(self) -> None:
        with self.watch.timed("time/score_again"):
            self.rescored += await asyncio.to_thread(self.components.sampler.rescore)

    async def _finish_step(self, batch: StepBatch, took_s: float) -> None:
        """Write the step and the run's new state to disk; the checkpoint finishes the step."""
        schedule = self.schedule.state(self.dispatcher.plans())
        self.watch.metrics |= self.schedule.metrics()
        progress = replace(self.progress, step=batch.step, schedule=schedule, train_s=self.progress.train_s + took_s)
        await asyncio.to_thread(self._write_step, batch, progress)

    def _write_step(self, batch: StepBatch, progress: Progress) -> None:
        counters = {"sampled_tokens": self.components.sampler.stats()["sampled_tokens"], "busy_s": self.client.busy_s}
        # The learner got truncated and pruned samples: where both count the same thing, the batch's count is right.
        discarded = self.client.take_discarded_tokens()
        numbers = self.watch.rates(counters) | self.watch.lap()
        numbers |= batch_metrics(batch, self.bound, self.components.train, discarded=discarded)
        progress.total_tokens += int(numbers["progress/tokens"])
        progress.total_samples += int(numbers["progress/rollouts"])
        progress.wall_s, progress.peak_rss_mb, numbers["progress/server_restarts"] = self.components.usage()
        numbers["progress/total_tokens"] = float(progress.total_tokens)
        numbers["progress/total_rollouts"] = float(progress.total_samples)
        if self.config.prices is not None:
            costs = cost_metrics(batch.rollouts, self.config.prices, numbers["time/step"])
            progress.cost_usd += costs["cost/step"]
            numbers |= costs | {"cost/total": progress.cost_usd}
        self.run.check_present()
        file = self.run.rollouts_file(batch.step)
        write_rows(file, self.transcripts.write(file.stem, batch.rows()))
        self.run.metrics.write({"step": batch.step, **numbers})
        save(self.run.checkpoints, self.components.learner.save, progress)
        self.progress = progress  # here, since the run may be cancelled meanwhile, and this thread goes on
        self.run.metrics.publish()
        prune(self.run.checkpoints, self.config.ckpt, self.config.max_steps)
        self.components.display.line(headline(batch.step, self.config.max_steps, numbers, batch.untrained()))

    async def _evaluate(self) -> None:
        """Run the evaluations that are due; no new group is started meanwhile."""
        names = self.evaluator.due_sources(self.progress.step, last=self._finished())
        if not names:
            return
        self.dispatcher.paused = True
        started = time.monotonic()
        await self.evaluator.evaluate(self.progress.step, names)
        self.progress.train_s += time.monotonic() - started
        self.dispatcher.paused = False
        self.watch.restart()

    async def wait_for_update(self, timeout: float) -> bool:  # noqa: ASYNC109 - returns False instead of raising
        """Wait at most `timeout` seconds until no update is in progress; return whether that is so."""
        try:
            async with asyncio.timeout(timeout), self.updating:
                return True
        except TimeoutError:
            return False
