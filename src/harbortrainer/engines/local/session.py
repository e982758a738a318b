"""One start of a local run, from its start to its summary.

Contract: however the block of `local_run` ends, it leaves no process, no thread of its own and no half-written file.
Invariant: Ctrl-C stops within `STOP_S` seconds, and finished steps stay finished.
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

from harbortrainer.config.prime_rl_run import trial_folders
from harbortrainer.config.redacted_config import redact
from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.cleanup import clean_up
from harbortrainer.engines.env_server import (
    STARTUP_S,
    keep_serving,
    plan_servers,
    server_key,
    server_variables,
    watch,
)
from harbortrainer.engines.local.factories import load_learner, memory_plan, start_sampler
from harbortrainer.engines.local.protocols import SamplerProtocol
from harbortrainer.engines.local.rollout_client import TaskStream
from harbortrainer.engines.local.rollouts.advantage import MIN_TRAINABLE
from harbortrainer.engines.local.train import LoopComponents, TrainingLoop
from harbortrainer.engines.local.weight_update import update_weights
from harbortrainer.engines.programs import WatchedProcess
from harbortrainer.errors import EXIT_INTERRUPTED, ProofError, RunStoppedError, UserError
from harbortrainer.harbor_compat import keep_litellm_offline
from harbortrainer.runs.checkpoints import Progress, latest, rewind, set_aside_damaged
from harbortrainer.runs.display import Display
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.interrupt import StopSignal
from harbortrainer.runs.label import run_label
from harbortrainer.runs.live_status import LiveStatus, LiveWriter
from harbortrainer.runs.log_files import limit_logs
from harbortrainer.runs.memory import PeakMemory, frozen_gc, limit_malloc_arenas
from harbortrainer.runs.monitors import monitors_of
from harbortrainer.runs.provenance import check_provenance, collect_provenance, evaluation_key
from harbortrainer.runs.summary import Status, Summary, evaluated_sources, recorded_times, report_summary, summarize
from harbortrainer.trials.start_watch import watch_starts

STOP_S = 10.0
UPDATE_GRACE_S = 3.0
"""Seconds that a stop waits for an update in progress; after that the step counts as not finished."""
CLOSE_S = 60.0
"""Seconds that any other end waits for the sampler and the servers: Python must not exit while their threads run."""

SENDING_S = 60.0
"""Seconds that a finished run waits for monitors that are sending; a stop waits `UPDATE_GRACE_S`."""


@contextlib.contextmanager
def local_run(
    config: RunConfig, run: RunFolder, *, resume: bool = False, kinds: Sequence[str] = ()
) -> Generator["Session"]:
    """Open one start of a run in this process; call it from the main thread.

    At the end of the block everything that was started in it is closed, and the summary is written. Ctrl-C ends the
    block without an exception; the summary has the status "interrupted".

    Args:
        config: The run.
        run: Its folder, made by `RunFolder.create`.
        resume: Continue from its last finished step.
        kinds: Environment types whose sandboxes are ended when an environment server ends.

    Raises:
        UserError: The config is invalid.
        RunStoppedError: The run cannot continue; the message has the reason and the remedy.
    """
    limit_malloc_arenas()
    keep_litellm_offline()
    session = Session(config, run, resume=resume, kinds=kinds)
    with session.memory, session.display, session.live, session.stop:
        try:
            yield session
        except KeyboardInterrupt:
            session.status = "interrupted"
        except (RunStoppedError, ProofError, OSError) as error:
            session.status = "stopped"
            session.failed_check = str(error) if isinstance(error, ProofError) else None
            run.check_present()
            with contextlib.suppress(OSError):  # A full disk is the error that is raised below.
                session.summary().write(run)
            if isinstance(error, ProofError):
                raise RunStoppedError(str(error)) from error
            raise
        except UserError:
            session.live.stop()  # it writes into the folder
            if not resume:
                run.discard_if_empty()
            raise
        finally:
            closed = session.close()
        session.show_summary() if closed else session.exit_process()


class Session:
    """One start of a run; opened and closed by `local_run`."""

    def __init__(self, config: RunConfig, run: RunFolder, *, resume: bool, kinds: Sequence[str] = ()) -> None:
        self.config, self.run, self.started, self.since = config, run, time.monotonic(), time.time()
        self.display, self.stop = Display(), StopSignal()
        self.live = LiveWriter(run.path, self.live_status)
        for line in set_aside_damaged(run.checkpoints) if resume else []:
            self.display.line(line)
        found = latest(run.checkpoints) if resume else None
        self.checkpoint, self.progress = found or (None, Progress())
        if resume:
            rewind(run, self.progress.step)
            wall_s, warmup_s, train_s = recorded_times(run)
            self.progress.wall_s = max(self.progress.wall_s, wall_s)
            self.progress.warmup_s = max(self.progress.warmup_s, warmup_s)
            self.progress.train_s = max(self.progress.train_s, train_s)
        self.resume, self.before_s = resume, self.progress.wall_s
        self.memory = PeakMemory(self.progress.peak_rss_mb)
        self.status: Status = "finished"
        self.failed_check: str | None = None
        settings = config.orchestrator
        self.key, variables = server_variables(run.path, run.trials, run.log)
        sources = [*settings.train.source, *(settings.eval.source if settings.eval else [])]
        self.servers, self.kinds = plan_servers(sources, run, variables), kinds
        self.trial_folders = trial_folders(sources, run.trials)
        self.train_streams: dict[str, TaskStream] = {}
        self.eval_streams: dict[str, TaskStream] = {}
        self.sampler: SamplerProtocol | None = None
        self.loop: TrainingLoop | None = None
        self.before_exit: Callable[[Status], object] = lambda _: None
        """Called before `exit_process` ends the process, since the caller of `local_run` does not get control back."""

    @property
    def complete(self) -> bool:
        """Whether all steps and the last evaluation are finished."""
        if self.config.max_steps is None or self.progress.step < self.config.max_steps:
            return False
        held_out = self.config.orchestrator.eval
        names = {source.resolved_name for source in held_out.source} if held_out else set()
        return not names or evaluated_sources(self.run).get(self.progress.step, set()) >= names

    def start_servers(self) -> None:
        """Load the tasks and start the environment servers.

        Errors in the tasks are raised before a server starts. The servers import their modules while the policy loads.

        Raises:
            UserError: A task is invalid, or a group has a single trial.
        """
        require_group_size(self.config)
        settings = self.config.orchestrator
        for source in settings.train.source:
            self.train_streams[source.resolved_name] = TaskStream(source, algo=source.algo or settings.algo)
        for source in settings.eval.source if settings.eval else []:
            self.eval_streams[source.resolved_name] = TaskStream(source, count=source.num_examples)
        for server in self.servers.values():
            server.start()

    def train(self, model: str) -> None:
        """Train a policy, of this folder or hub id, until the run's last step."""
        held_out = {evaluation_key(name, self.train_streams): stream for name, stream in self.eval_streams.items()}
        recorded = {**self.train_streams, **held_out}
        keys = {key: stream.keys() for key, stream in recorded.items()}
        made_of = collect_provenance(model, keys, {key: stream.origin() for key, stream in recorded.items()})
        for line in check_provenance(self.run.path, made_of, resume=self.resume):
            self.display.line(line)
        if self.config.inference.engine == "vllm":
            self.display.line(f"starting vLLM, which takes a minute or more (log: {self.run.log / 'vllm.log'})")
        plan = memory_plan(model, self.config)
        with self.display.phase("loading the policy"):
            sampler = self.sampler = start_sampler(model, self.config, plan, api_key=self.key.sampler_key)
            learner = load_learner(model, self.config, sampler, plan)
            if self.checkpoint is not None:
                learner.load(self.checkpoint)
                update_weights(learner, sampler)
                self.display.line(f"continuing after step {self.progress.step}")
        parts = LoopComponents(
            sampler=sampler,
            learner=learner,
            train=self.train_streams,
            held_out=self.eval_streams,
            display=self.display,
            usage=self.usage,
        )
        shown = redact(self.config.model_dump(mode="json", exclude_none=True))
        self.run.metrics.start(monitors_of(self.config, self.run.path, shown=shown), self.display.line)
        with frozen_gc():
            streams = recorded.values()
            asyncio.run(self._run(model, parts, [*sampler.processes, *streams]))

    async def _run(self, model: str, parts: LoopComponents, required: Sequence[WatchedProcess]) -> None:
        """Run until the loop ends, a required process exits, or a stop is requested."""
        work = asyncio.create_task(self._work(model, parts))
        watched = asyncio.create_task(self._watch(required))
        trimming = asyncio.create_task(limit_logs(self.run.log))
        stop_requested = asyncio.create_task(self.stop.wait())
        await asyncio.wait({work, watched, stop_requested}, return_when=asyncio.FIRST_COMPLETED)
        idle = True
        if not (work.done() or watched.done()):
            # Let an update in progress finish if it is quick, then cancel everything.
            self.status = "interrupted"
            idle = self.loop is None or await self.loop.wait_for_update(UPDATE_GRACE_S)
        tasks = (work, watched, stop_requested, trimming)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.servers.values():
            server.close()
        for stream in [*self.train_streams.values(), *self.eval_streams.values()]:
            await stream.close()
        if not idle:
            self.close()
            self.exit_process()
        for task in (work, watched):
            if not task.cancelled():
                task.result()

    async def _watch(self, required: Sequence[WatchedProcess]) -> None:
        """Start servers again that end; raise the error of another process that ends, or of a provider given up."""

        def end(owner: str) -> Sequence[str]:
            return clean_up(run_label(self.run.path), self.kinds, owner=owner)

        keeping = [keep_serving(server, end, self.display.line) for server in self.servers.values()]
        starts = watch_starts(self.trial_folders, self.display.line)
        watches = [asyncio.create_task(it) for it in (watch(required), starts, *keeping)]
        try:
            await asyncio.gather(*watches)
        finally:
            for task in watches:
                task.cancel()

    async def _work(self, model: str, parts: LoopComponents) -> None:
        with self.display.phase("waiting for the environment servers"):
            await self._connect(model, parts.sampler.url)
        self.loop = TrainingLoop(self.config, self.run, parts, self.progress)
        await self.loop.run_remaining_steps()

    async def _connect(self, model: str, url: str) -> None:
        """Connect every source to its server."""
        renderer = TypeAdapter(RendererConfig).validate_python(self.config.orchestrator.renderer)
        policy = TrainClientConfig(
            base_url=f"{url}/v1",
            api_key_var=self.key.sampler_variable,
            renderer=renderer,
            renderer_model_name=model,
        )
        addresses = {key: await asyncio.to_thread(server.address) for key, server in self.servers.items()}
        for stream in [*self.train_streams.values(), *self.eval_streams.values()]:
            await stream.connect(addresses[server_key(stream.config)], policy, model, self.key, STARTUP_S)

    def usage(self) -> tuple[float, float, float]:
        """Return the seconds and peak memory (MB) of all starts of the run, and the server restarts of this one."""
        restarts = sum(server.restarts for server in self.servers.values())
        return self.before_s + time.monotonic() - self.started, self.memory.peak_mb, float(restarts)

    def live_status(self) -> LiveStatus:
        """Return what the run is doing, for `live.json`; called in another thread."""
        trials = self.loop.client.in_flight.copy() if self.loop else []
        return LiveStatus(since=self.since - self.before_s, phases=self.display.phases, trials=trials)

    def close(self) -> bool:
        """Close everything that was opened, in parallel.

        Returns:
            Whether everything has stopped; a sampler in a long forward pass may not have.
        """
        for server in self.servers.values():
            server.close()
        stops = [*[server.stop for server in self.servers.values()], *([self.sampler.stop] if self.sampler else [])]
        threads = [threading.Thread(target=stop, daemon=True) for stop in stops]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + (STOP_S - UPDATE_GRACE_S if self.status == "interrupted" else CLOSE_S)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.run.metrics.close(SENDING_S if self.status == "finished" else UPDATE_GRACE_S)
        return not any(thread.is_alive() for thread in threads)

    def summary(self) -> Summary:
        """Return the summary of the run so far."""
        self.memory.sample()
        progress = self.loop.progress if self.loop else self.progress
        wall_s, peak_rss_mb, _ = self.usage()
        return summarize(
            self.run,
            replace(progress, wall_s=wall_s, peak_rss_mb=peak_rss_mb),
            model=self.config.model.name,
            seed=self.config.seed,
            status=self.status,
            failed_check=self.failed_check,
        )

    def show_summary(self) -> None:
        """Write the summary to disk and print it."""
        report_summary(self.summary(), self.run, self.display)

    def exit_process(self) -> NoReturn:
        """End the process at once, without waiting for a thread in a long computation; everything is on disk."""
        self.show_summary()
        self.display.close()
        self.live.stop()
        self.before_exit(self.status)
        exit_now(EXIT_INTERRUPTED if self.status == "interrupted" else 0)


def exit_now(code: int) -> NoReturn:
    """End the process with this exit code, without the interpreter's shutdown, which takes seconds with torch."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def require_group_size(config: RunConfig) -> None:
    """Check that every group has at least two trials.

    A single trial has an advantage of 0. It trains nothing, except predicted tokens with ECHO.

    Raises:
        UserError: A source has a smaller group_size.
    """
    for source in config.orchestrator.train.source:
        algo = source.algo or config.orchestrator.algo
        if source.group_size < MIN_TRAINABLE and algo.type != "echo":
            raise UserError(
                f"source {source.resolved_name!r} has one trial per group, so its reward has nothing to compare with",
                where="orchestrator.group_size",
                do="set it to 2 or more; 8 is usual",
            )
