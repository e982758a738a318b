"""The steps of a run.

One step: cut a batch of groups, train on it while the next one is sampled, hand the new policy version to the
sampler, write the step down. Evaluation comes before the first step, every interval and after the last.

Invariant: a step is finished when its checkpoint stands; its rollouts and its line of metrics are on disk before
that. Version n of the policy is what n steps made of it.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.local import checkpoint
from harbortrainer.engines.local.batches import Batch, Batches
from harbortrainer.engines.local.checkpoint import Progress
from harbortrainer.engines.local.collector import Collector
from harbortrainer.engines.local.engine import Engine
from harbortrainer.engines.local.evaluator import Evaluator
from harbortrainer.engines.local.metrics import batch_metrics
from harbortrainer.engines.local.player import Player
from harbortrainer.engines.local.schedule import Schedule
from harbortrainer.engines.local.source import Source
from harbortrainer.engines.local.staleness import OffPolicyBound
from harbortrainer.engines.local.stopwatch import Stopwatch
from harbortrainer.runs.curve import TRAIN_KEY
from harbortrainer.runs.display import Display
from harbortrainer.runs.durable import append_line, write_lines
from harbortrainer.runs.folder import RunFolder


class Steps:
    """A run from its last finished step to its last step. Lives inside one event loop.

    Args:
        engine: Models loaded, sources connected.
        progress: Where the run stands; replaced with every finished step.
        clock: Gives the run's seconds and peak memory up to now, over every start.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunFolder,
        engine: Engine,
        display: Display,
        progress: Progress,
        clock: Callable[[], tuple[float, float]],
    ) -> None:
        self.clock = clock
        self.config, self.run, self.engine, self.display, self.progress = config, run, engine, display, progress
        orchestrator = config.orchestrator
        self.player = Player(
            engine.sampler.ledger, seq_len=config.seq_len, max_inflight=orchestrator.concurrency.max_inflight
        )
        self.collector = Collector(
            engine.train_sources,
            schedule_of(engine.train_sources, config.seed, progress),
            Batches(batch_size=orchestrator.batch_size, bound=OffPolicyBound(orchestrator.max_off_policy_steps)),
            self.player,
            step=progress.step,
            last_step=config.max_steps,
        )
        self.evaluator = Evaluator(config, run, engine.eval_sources, self.player, display)
        self.watch = Stopwatch()
        self.updating = asyncio.Lock()

    async def run_all(self) -> None:
        """Every step that is left, and the evaluations between them."""
        await self._evaluate()
        with self.display.bar("steps", self.config.max_steps, plain=False) as bar:
            bar.set(self.progress.step)
            while not self._finished():
                await self._step()
                bar.set(self.progress.step)
                await self._evaluate()

    def _finished(self) -> bool:
        return self.config.max_steps is not None and self.progress.step >= self.config.max_steps

    async def _evaluate(self) -> None:
        """Evaluate what is due now; no new group is started meanwhile."""
        step = self.progress.step
        names = self.evaluator.wanted(step, last=self._finished())
        if not names:
            return
        self.collector.paused = True
        started = time.monotonic()
        await self.evaluator.evaluate(step, names)
        self.progress.train_s += time.monotonic() - started
        self.collector.paused = False
        self.watch.restart()

    async def _step(self) -> None:
        step, started = self.progress.step + 1, time.monotonic()
        with (
            self.watch.timed("time/wait_for_rollouts"),
            self.display.bar(f"step {step}: sampling", self.config.orchestrator.batch_size) as bar,
        ):
            batch = await self.collector.batch(step, bar.set)
        async with self.updating:
            await self._update(batch)
            schedule = self.collector.schedule.state(self.collector.plans())
            train_s = self.progress.train_s + time.monotonic() - started
            progress = replace(self.progress, step=step, schedule=schedule, train_s=train_s)
            self.progress = await asyncio.to_thread(self._write, batch, progress)

    async def _update(self, batch: Batch) -> None:
        """Train on a batch and make the new version the one that samples."""
        with self.watch.timed("time/train"):
            learned = await asyncio.to_thread(self.engine.learner.train, batch.samples)
        self.watch.numbers |= learned
        with self.watch.timed("time/hand_over"):
            await asyncio.to_thread(self.engine.hand_over)
        await self.collector.new_version(batch.step)

    def _write(self, batch: Batch, progress: Progress) -> Progress:
        """Write a step down, and where the run stands then. With its checkpoint the step is finished."""
        numbers = batch_metrics(batch, self.collector.batches.bound)
        progress.total_tokens += int(numbers["progress/tokens"])
        progress.total_samples += int(numbers["progress/rollouts"])
        progress.wall_s, progress.peak_rss_mb = self.clock()
        counters = {"sampled_tokens": self.engine.sampler.stats()["sampled_tokens"], "busy_s": self.player.busy_s}
        numbers |= self.watch.rates(counters) | self.watch.lap()
        numbers["progress/total_tokens"] = float(progress.total_tokens)
        numbers["progress/total_rollouts"] = float(progress.total_samples)
        write_lines(self.run.rollouts_file(batch.step), rows_of(batch))
        append_line(self.run.metrics_file, {"step": batch.step, **numbers})
        checkpoint.save(self.run.checkpoints, self.engine.learner, progress)
        checkpoint.prune(self.run.checkpoints, self.config.ckpt, self.config.max_steps)
        self.display.line(headline(batch.step, self.config.max_steps, numbers))
        return progress

    async def settled(self, within: float) -> bool:
        """Wait until no update is under way, at most `within` seconds; whether that is so."""
        try:
            async with asyncio.timeout(within), self.updating:
                return True
        except TimeoutError:
            return False


def schedule_of(sources: dict[str, Source], seed: int, progress: Progress) -> Schedule:
    """The schedule of these sources, where the run stands."""
    counts = {name: len(source.tasks) for name, source in sources.items()}
    ratios = {name: source.ratio for name, source in sources.items()}
    schedule = Schedule(counts, ratios, seed=seed)
    if progress.schedule:
        schedule.restore(progress.schedule)
    return schedule


def rows_of(batch: Batch) -> list[dict[str, Any]]:
    """The lines of `rollouts/step_N.jsonl`: what arrived, with the advantage of what trained."""
    trained: dict[int, tuple[str, float]] = {}
    for group in batch.groups:
        for rollout, advantage in zip(group.survivors, group.advantages(), strict=True):
            trained[id(rollout)] = (group.id, advantage)
    rows = []
    for rollout in batch.arrived:
        group, advantage = trained.get(id(rollout), (None, None))
        rows.append(rollout.row(step=batch.step, kind="train", group=group, advantage=advantage))
    return rows


def headline(step: int, max_steps: int | None, numbers: dict[str, float]) -> str:
    """One step in one line."""
    of = f"/{max_steps}" if max_steps else ""
    failed = numbers.get("train/agg/all/has_error/mean", 0.0)
    parts = [
        f"step {step}{of}",
        f"reward {numbers.get(TRAIN_KEY, float('nan')):.3f}",
        f"{numbers['batch/samples']:.0f} samples",
        f"{numbers['time/step']:.1f} s (waited {numbers['time/wait_for_rollouts']:.1f})",
    ]
    return "  ".join(parts) + (f"  {failed:.0%} of trials failed" if failed else "")
