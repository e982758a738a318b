"""A whole local run: start, loop, stop, summary.

Contract: `train` blocks until the run is finished or was stopped, and leaves nothing behind: no process, no thread of
its own, no half-written file. Invariant: Ctrl-C stops within `STOP_S` seconds, and what was finished stays finished.
"""

import asyncio
import contextlib
import os
import sys
import time
from typing import NoReturn

from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.local import checkpoint
from harbortrainer.engines.local.checkpoint import Progress
from harbortrainer.engines.local.engine import Engine
from harbortrainer.engines.local.evaluator import evaluations
from harbortrainer.engines.local.interrupt import EXIT_INTERRUPTED, StopSignal
from harbortrainer.engines.local.learner.proof import ProofError
from harbortrainer.engines.local.report import report, summarize
from harbortrainer.engines.local.steps import Steps
from harbortrainer.engines.local.stop import RunStoppedError
from harbortrainer.errors import UserError
from harbortrainer.runs.display import Display
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.memory import PeakMemory, steady_heap
from harbortrainer.runs.resume import rewind
from harbortrainer.runs.summary import Status, Summary

STOP_S = 10.0
UPDATE_GRACE_S = 3.0
"""How long a stop waits for an update that is under way; after that the step counts as not finished."""


def train(config: RunConfig, run: RunFolder, *, resume: bool = False) -> Summary:
    """Train a policy on this machine, in this process, from the main thread.

    Args:
        config: The run.
        run: Its folder, made by `RunFolder.create`.
        resume: Go on from the last finished step in it.

    Raises:
        UserError: Something in the config cannot be.
        RunStoppedError: The run cannot go on; the message says why and what to do.
    """
    steady_heap()
    # Without a network LiteLLM would try to download its price list, again and again.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    return Session(config, run, resume=resume).run_to_the_end()


class Session:
    """One start of a run."""

    def __init__(self, config: RunConfig, run: RunFolder, *, resume: bool) -> None:
        self.config, self.run, self.started = config, run, time.monotonic()
        self.display = Display()
        self.checkpoint, self.progress = None, Progress()
        self.steps: Steps | None = None
        if resume:
            found = checkpoint.latest(run.checkpoints)
            if found is not None:
                self.checkpoint, self.progress = found
            rewind(run, self.progress.step)
        self.before_s = self.progress.wall_s
        self.engine = Engine(config, run)
        self.memory = PeakMemory(self.progress.peak_rss_mb)
        self.status: Status = "finished"

    def run_to_the_end(self) -> Summary:
        """Start everything, run the loop, close everything, sum up."""
        with self.memory, self.display, StopSignal() as stop:
            try:
                if not self._nothing_left():
                    self._start()
                    asyncio.run(self._run(stop))
            except KeyboardInterrupt:
                self.status = "interrupted"
            except (RunStoppedError, ProofError) as error:
                self.status = "stopped"
                self._summary().write(self.run)
                raise error if isinstance(error, RunStoppedError) else RunStoppedError(str(error)) from error
            except UserError:
                self.run.discard_if_empty()
                raise
            finally:
                closed = self.engine.close(within=STOP_S - UPDATE_GRACE_S)
            return self._end() if closed else self._leave()

    def _nothing_left(self) -> bool:
        """Whether every step was made and the last evaluation too."""
        if self.config.max_steps is None or self.progress.step < self.config.max_steps:
            return False
        made = {row["step"] for row in evaluations(self.run)}
        return self.config.orchestrator.eval is None or self.progress.step in made

    def _start(self) -> None:
        self.engine.load_tasks()
        self.engine.start_servers()
        self.engine.make_policy(self.display)
        self.progress.warmup_s = max(self.progress.warmup_s, self.engine.warmup_s)
        self.engine.load_models()
        if self.checkpoint is not None:
            self.engine.learner.load(self.checkpoint)
            self.engine.hand_over()
            self.display.line(f"going on after step {self.progress.step}")

    async def _run(self, stop: StopSignal) -> None:
        stop.attach()
        work = asyncio.create_task(self._work())
        asked = asyncio.create_task(stop.wait())
        await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        settled = work.done() or await self._interrupt(work)
        await self.engine.disconnect()
        if not settled:
            self.engine.close(within=STOP_S - UPDATE_GRACE_S)
            self._leave()
        if not work.cancelled():
            work.result()

    async def _work(self) -> None:
        tasks = [asyncio.create_task(self._steps()), asyncio.create_task(self.engine.watch_servers())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _steps(self) -> None:
        await self.engine.connect()
        self.steps = Steps(self.config, self.run, self.engine, self.display, self.progress, self._clock)
        try:
            await self.steps.run_all()
        finally:
            await self.steps.collector.stop()

    async def _interrupt(self, work: asyncio.Task[None]) -> bool:
        """Stop cleanly: let an update under way end if it is quick, then cancel everything. Whether it did end."""
        self.status = "interrupted"
        settled = self.steps is None or await self.steps.settled(UPDATE_GRACE_S)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        return settled

    def _clock(self) -> tuple[float, float]:
        return self.before_s + time.monotonic() - self.started, self.memory.peak_mb

    def _summary(self) -> Summary:
        self.memory.look()
        wall_s, peak_rss_mb = self._clock()
        return summarize(
            self.config,
            self.run,
            self.steps.progress if self.steps else self.progress,
            wall_s=wall_s,
            peak_rss_mb=peak_rss_mb,
            status=self.status,
        )

    def _leave(self) -> NoReturn:
        """End the process now: a thread in the middle of a long computation would hold it up, and all is written."""
        self._end()
        self.display.close()
        sys.stdout.flush()
        os._exit(EXIT_INTERRUPTED if self.status == "interrupted" else 0)

    def _end(self) -> Summary:
        summary = self._summary()
        report(summary, self.run, self.display)
        return summary
