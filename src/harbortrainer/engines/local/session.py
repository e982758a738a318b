"""One start of a local run: start, loop, stop, summary.

Contract: the block of `local_run` leaves nothing behind, however it ends: no process, no thread of its own, no
half-written file. Invariant: Ctrl-C stops within `STOP_S` seconds, and what was finished stays finished.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import NoReturn

from pydantic import TypeAdapter
from renderers import RendererConfig
from verifiers.v1.configs.client import TrainClientConfig

from harbortrainer.config.published_config import published
from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.env_server import STARTUP_S, plan_servers, server_key, watch
from harbortrainer.engines.local.parts import (
    SamplerPart,
    hand_over,
    load_learner,
    planned_memory,
    start_sampler,
)
from harbortrainer.engines.local.playing import TaskStream
from harbortrainer.engines.local.rollouts.group import MIN_SURVIVORS
from harbortrainer.engines.local.train import Parts, TrainingLoop
from harbortrainer.engines.programs import WatchedProcess
from harbortrainer.errors import EXIT_INTERRUPTED, ProofError, RunStoppedError, UserError
from harbortrainer.harbor_side import keep_litellm_offline
from harbortrainer.runs.display import Display
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.ingredients import check_ingredients, ingredients
from harbortrainer.runs.interrupt import StopSignal
from harbortrainer.runs.memory import PeakMemory, imports_left_alone, steady_heap
from harbortrainer.runs.monitors import monitors_of
from harbortrainer.runs.progress import Progress, latest, rewind, set_damaged_aside
from harbortrainer.runs.summary import Status, Summary, evaluations, show, spent, summarize

STOP_S = 10.0
UPDATE_GRACE_S = 3.0
"""How long a stop waits for an update that is under way; after that the step counts as not finished."""

SENDING_S = 60.0
"""How long a finished run waits for monitors that are sending; a stop waits as for an update."""


@contextlib.contextmanager
def local_run(config: RunConfig, run: RunFolder, *, resume: bool = False) -> Generator["Session"]:
    """One start of a run on this machine, in this process, from the main thread.

    Everything that is started in the block is closed at its end, and the run is summed up; Ctrl-C ends the block
    without an exception, and the summary says so.

    Args:
        config: The run.
        run: Its folder, made by `RunFolder.create`.
        resume: Go on from the last finished step in it.

    Raises:
        UserError: Something in the config cannot be.
        RunStoppedError: The run cannot go on; the message says why and what to do.
    """
    steady_heap()
    keep_litellm_offline()
    session = Session(config, run, resume=resume)
    with session.memory, session.display, session.stop:
        try:
            yield session
        except KeyboardInterrupt:
            session.status = "interrupted"
        except (RunStoppedError, ProofError, OSError) as error:
            session.status = "stopped"
            run.need()
            with contextlib.suppress(OSError):  # A full disk has been told of already.
                session.sum_up().write(run)
            if isinstance(error, ProofError):
                raise RunStoppedError(str(error)) from error
            raise
        except UserError:
            run.discard_if_empty()
            raise
        finally:
            closed = session.close()
        session.end() if closed else session.leave()


class Session:
    """One start of a run; `local_run` opens and closes it."""

    def __init__(self, config: RunConfig, run: RunFolder, *, resume: bool) -> None:
        self.config, self.run, self.started = config, run, time.monotonic()
        self.display, self.stop = Display(), StopSignal()
        for line in set_damaged_aside(run.checkpoints) if resume else []:
            self.display.line(line)
        found = latest(run.checkpoints) if resume else None
        self.checkpoint, self.progress = found or (None, Progress())
        if resume:
            rewind(run, self.progress.step)
            wall_s, train_s = spent(run)
            self.progress.wall_s = max(self.progress.wall_s, wall_s)
            self.progress.train_s = max(self.progress.train_s, train_s)
        self.resume, self.before_s = resume, self.progress.wall_s
        self.memory = PeakMemory(self.progress.peak_rss_mb)
        self.status: Status = "finished"
        settings = config.orchestrator
        self.servers = plan_servers([*settings.train.source, *(settings.eval.source if settings.eval else [])], run)
        self.train_streams: dict[str, TaskStream] = {}
        self.eval_streams: dict[str, TaskStream] = {}
        self.sampler: SamplerPart | None = None
        self.loop: TrainingLoop | None = None
        self.let_go: Callable[[Status], object] = lambda _: None
        """What is called before the process ends without going back to who opened the session."""

    @property
    def complete(self) -> bool:
        """Whether every step was made and the last evaluation too."""
        if self.config.max_steps is None or self.progress.step < self.config.max_steps:
            return False
        return self.config.orchestrator.eval is None or self.progress.step in evaluations(self.run)

    def start_servers(self) -> None:
        """Read the tasks, so that a mistake in them is told before anything is started, and start the environment
        servers: they import while the policy is being made."""
        refuse_lonely_trials(self.config)
        settings = self.config.orchestrator
        for source in settings.train.source:
            self.train_streams[source.resolved_name] = TaskStream(source, algo=source.algo or settings.algo)
        for source in settings.eval.source if settings.eval else []:
            self.eval_streams[source.resolved_name] = TaskStream(source, count=source.num_examples)
        for server in self.servers.values():
            server.start()

    def train(self, model: str, *, warmup_s: float = 0.0) -> None:
        """Train a policy until the run's last step.

        Args:
            model: Its folder, or a hub id.
            warmup_s: Seconds that making it took just now.
        """
        self.progress.warmup_s = max(self.progress.warmup_s, warmup_s)
        streams = [*self.train_streams.values(), *self.eval_streams.values()]
        keys = {stream.name: stream.keys() for stream in streams}
        made_of = ingredients(model, keys, {stream.name: stream.origin() for stream in streams})
        for line in check_ingredients(self.run.path, made_of, resume=self.resume):
            self.display.line(line)
        if self.config.inference.engine == "vllm":
            self.display.line(f"vLLM starts, which takes a minute or more ({self.run.log / 'vllm.log'})")
        plan = planned_memory(model, self.config)
        sampler = self.sampler = start_sampler(model, self.config, plan)
        learner = load_learner(model, self.config, sampler, plan)
        if self.checkpoint is not None:
            learner.load(self.checkpoint)
            hand_over(learner, sampler)
            self.display.line(f"going on after step {self.progress.step}")
        parts = Parts(
            sampler=sampler,
            learner=learner,
            train=self.train_streams,
            held_out=self.eval_streams,
            display=self.display,
            used=self.used,
        )
        shown = published(self.config.model_dump(mode="json", exclude_none=True))
        self.run.metrics.start(monitors_of(self.config, self.run.path, shown=shown), self.display.line)
        with imports_left_alone():
            asyncio.run(self._run(model, parts, [*self.servers.values(), *sampler.processes]))

    async def _run(self, model: str, parts: Parts, needed: Sequence[WatchedProcess]) -> None:
        """Until the loop is at its end, a server is gone, or a stop is asked for."""
        work = asyncio.create_task(self._work(model, parts))
        watched = asyncio.create_task(watch(needed))
        asked = asyncio.create_task(self.stop.wait())
        await asyncio.wait({work, watched, asked}, return_when=asyncio.FIRST_COMPLETED)
        settled = True
        if not (work.done() or watched.done()):
            # Let an update under way end if it is quick, then cancel everything.
            self.status = "interrupted"
            settled = self.loop is None or await self.loop.settled(UPDATE_GRACE_S)
        for task in (work, watched, asked):
            task.cancel()
        await asyncio.gather(work, watched, asked, return_exceptions=True)
        for server in self.servers.values():
            server.close()
        for stream in [*self.train_streams.values(), *self.eval_streams.values()]:
            await stream.close()
        if not settled:
            self.close()
            self.leave()
        for task in (work, watched):
            if not task.cancelled():
                task.result()

    async def _work(self, model: str, parts: Parts) -> None:
        await self._connect(model, parts.sampler.url)
        self.loop = TrainingLoop(self.config, self.run, parts, self.progress)
        await self.loop.run_all()

    async def _connect(self, model: str, url: str) -> None:
        """Connect every source to its server."""
        renderer = TypeAdapter(RendererConfig).validate_python(self.config.orchestrator.renderer)
        policy = TrainClientConfig(
            base_url=f"{url}/v1", api_key_var="HARBORTRAINER_NO_KEY", renderer=renderer, renderer_model_name=model
        )
        addresses = {key: await asyncio.to_thread(server.address) for key, server in self.servers.items()}
        for stream in [*self.train_streams.values(), *self.eval_streams.values()]:
            await stream.connect(addresses[server_key(stream.config)], policy, model, STARTUP_S)

    def used(self) -> tuple[float, float]:
        """The run's seconds and peak memory (MB) up to now, over every start."""
        return self.before_s + time.monotonic() - self.started, self.memory.peak_mb

    def close(self) -> bool:
        """Close everything that was opened, side by side.

        Returns:
            Whether everything is down; a sampler in the middle of a long forward pass may not be.
        """
        for server in self.servers.values():
            server.close()
        stops = [*[server.stop for server in self.servers.values()], *([self.sampler.stop] if self.sampler else [])]
        threads = [threading.Thread(target=stop, daemon=True) for stop in stops]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + STOP_S - UPDATE_GRACE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.run.metrics.close(SENDING_S if self.status == "finished" else UPDATE_GRACE_S)
        return not any(thread.is_alive() for thread in threads)

    def sum_up(self) -> Summary:
        """What the run came to up to now."""
        self.memory.look()
        progress = self.loop.progress if self.loop else self.progress
        wall_s, peak_rss_mb = self.used()
        return summarize(
            self.run,
            replace(progress, wall_s=wall_s, peak_rss_mb=peak_rss_mb),
            model=self.config.model.name,
            seed=self.config.seed,
            status=self.status,
        )

    def end(self) -> None:
        """Sum up, write it down and show it."""
        show(self.sum_up(), self.run, self.display)

    def leave(self) -> NoReturn:
        """End the process now: a thread in the middle of a long computation would hold it up, and all is written."""
        self.end()
        self.display.close()
        self.let_go(self.status)
        leave(EXIT_INTERRUPTED if self.status == "interrupted" else 0)


def leave(code: int) -> NoReturn:
    """End the process with this exit code, now: all is written and closed, and to take a torch of many modules apart
    would take the interpreter seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse_lonely_trials(config: RunConfig) -> None:
    """A trial is compared with the others of its group; alone it has an advantage of 0 and teaches nothing but, with
    ECHO, to predict what the model was told."""
    for source in config.orchestrator.train.source:
        algo = source.algo or config.orchestrator.algo
        if source.group_size < MIN_SURVIVORS and algo.type != "echo":
            raise UserError(
                f"source {source.resolved_name!r} plays each task once, so there is nothing to compare a trial with",
                where="orchestrator.group_size",
                do="set it to 2 or more; 8 is usual",
            )
