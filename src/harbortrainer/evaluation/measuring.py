"""Run the missing trials of an evaluation, with the environment server that training uses.

Contract: `run_missing_trials` returns when all attempts have run or a stop is requested, and leaves no process behind.
Each trial is written when it ends. If the environment server ends, it is started again, and its trials are played
again. Invariant: all tasks get their first attempt before any gets its second, so that an
interrupted evaluation has about equally many attempts at each.
"""

import asyncio
import glob
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harbortrainer.config.plugin import PLUGIN_ID
from harbortrainer.config.table import TomlTable
from harbortrainer.engines.cleanup import clean_up
from harbortrainer.engines.env_server import STARTUP_S, EnvServer, keep_serving, server_variables
from harbortrainer.engines.env_server.remote_server import RemoteServer, ServerLostError
from harbortrainer.engines.local.rollouts.group import MAX_SERVER_ENDS
from harbortrainer.environment.request_check import RunKey
from harbortrainer.errors import UserError
from harbortrainer.evaluation.candidate import Candidate, ServedModel
from harbortrainer.evaluation.eval_folder import EvalFolder, EvalSpec
from harbortrainer.evaluation.eval_rules import ONE_WORKER
from harbortrainer.runs.display import Bar, Display
from harbortrainer.runs.interrupt import StopSignal
from harbortrainer.runs.label import run_label
from harbortrainer.runs.live_status import ActiveTrial, LiveStatus, LiveWriter
from harbortrainer.runs.trace_transcript import transcript_of
from harbortrainer.runs.trial_row import TrialRow
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import record_of
from harbortrainer.trials.start_watch import watch_starts

if TYPE_CHECKING:
    from verifiers.v1.episode import WireEpisode
    from verifiers.v1.serve import EnvClient
    from verifiers.v1.task import Task

MAX_MISSES = 3
"""Consecutive trials without an answer of the model after which its server is checked."""


def run_missing_trials(folder: EvalFolder, candidate: Candidate, *, parallel: int, display: Display) -> bool:
    """Run the missing trials of an evaluation folder. Call this from the main thread.

    Args:
        folder: The evaluation, open for writing.
        candidate: The policy.
        parallel: Concurrent trials.
        display: Display for the progress.

    Returns:
        Whether all trials have run; false after a stop request.

    Raises:
        UserError: The model's server is gone or cannot be started; finished trials are in the folder.
        RunStoppedError: The environment server ended before it served, or too often; or a provider is given up.
    """
    spec = folder.spec
    left = attempts_left(spec.keys, spec.attempts, folder.graded())
    if not left:
        return True
    tasks = load_tasks(spec)
    key, variables = server_variables(folder.path, folder.path, folder.log)
    server = EnvServer("eval", env_table(spec), ONE_WORKER, log=folder.log / "env.log", variables=variables)
    stop = StopSignal()
    try:
        with stop:
            server.start()
            with candidate.serve(spec.rules, key) as served, display.bar("evaluating", len(left)) as bar:
                measuring = EvalRunner(folder, candidate, served, key, tasks, asyncio.Semaphore(parallel), display, bar)
                with LiveWriter(folder.path, measuring.live_status):
                    return asyncio.run(measuring.until_done(server, left, stop))
    except KeyboardInterrupt:
        return False
    finally:
        server.stop()
        folder.set_aside_uncounted()


def load_tasks(spec: EvalSpec) -> "list[Task]":
    """Load an evaluation's tasks as verifiers tasks, in the order of `EvalSpec.keys`."""
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

    found = {str(task.key): task for task in load_taskset(resolve_env_config(env_table(spec)).taskset)}
    return [found[key] for key in spec.keys]


def env_table(spec: EvalSpec) -> TomlTable:
    """Return the `env` table of an evaluation, which limits its concurrent trials itself."""
    own = spec.rules.env.get("taskset")
    harness = {key: value for key, value in spec.rules.agent["harness"].items() if key != "n_parallel_envs"}
    taskset = (own if isinstance(own, dict) else {}) | {
        "id": PLUGIN_ID,
        "tasks_dir": spec.tasks_dir,
        "include": [glob.escape(name) for name in spec.tasks],
    }
    return spec.rules.env | {"taskset": taskset, "agent": spec.rules.agent | {"harness": harness}}


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """A trial that has to run."""

    index: int
    """Index of the task."""
    number: int
    """Number of the attempt, from 0."""


def attempts_left(keys: Sequence[str], attempts: int, graded: set[tuple[str, int]]) -> list[PlannedTrial]:
    """Return the missing attempts; the first attempts at all tasks come before the second ones."""
    return [
        PlannedTrial(index, number)
        for number in range(attempts)
        for index, key in enumerate(keys)
        if (key, number) not in graded
    ]


@dataclass
class EvalRunner:
    """Runner of the missing trials for one start of an evaluation."""

    folder: EvalFolder
    candidate: Candidate
    served: ServedModel
    key: RunKey
    tasks: "Sequence[Task]"
    slots: asyncio.Semaphore
    display: Display
    bar: Bar
    client: "EnvClient | None" = None
    remote: RemoteServer | None = None
    misses: int = 0
    in_flight: list[ActiveTrial] = field(default_factory=list)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def live_status(self) -> LiveStatus:
        """Return the status for `live.json`; called in another thread."""
        return LiveStatus(since=self.bar.since, phases=self.display.phases, trials=self.in_flight.copy())

    async def until_done(self, server: EnvServer, left: Sequence[PlannedTrial], stop: StopSignal) -> bool:
        """Run trials until all have run, a server is gone, or a stop is requested; return whether all have run."""
        label, kinds = run_label(self.folder.path), [self.folder.spec.rules.environment_type]
        keeping = keep_serving(server, lambda owner: clean_up(label, kinds, owner=owner), self.display.line)
        work = asyncio.create_task(self._play_all(server, left))
        starts = watch_starts([self.folder.path], self.display.line)
        ends = [work, *(asyncio.create_task(watch) for watch in (keeping, starts, stop.wait()))]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        server.close()
        if self.remote is not None:
            await self.remote.close()
        if self.client is not None:
            await self.client.close()
        for task in ends[:3]:
            if not task.cancelled():
                task.result()
        return not work.cancelled()

    async def _play_all(self, server: EnvServer, left: Sequence[PlannedTrial]) -> None:
        from verifiers.v1.serve import EnvClient

        self.client = EnvClient(address=await asyncio.to_thread(server.address))
        await self.client.wait_for_server_startup(timeout=STARTUP_S, interval=0.5)
        self.remote = RemoteServer("eval", self.client, may_be_silent=True)
        trials = [asyncio.create_task(self._play(attempt)) for attempt in left]
        try:
            await asyncio.gather(*trials)
        finally:
            for trial in trials:
                trial.cancel()
            await asyncio.gather(*trials, return_exceptions=True)

    async def _play(self, attempt: PlannedTrial) -> None:
        async with self.slots:
            active = ActiveTrial(task=str(self.tasks[attempt.index].data.name or attempt.index), since=time.time())
            self.in_flight.append(active)
            try:
                row, transcript = await self._trial(attempt)
            finally:
                self.in_flight.remove(active)
            async with self.writing:
                await asyncio.to_thread(self.folder.add, row, transcript)
        self.bar.advance()
        await self._check_server(row)

    async def _trial(self, attempt: PlannedTrial) -> tuple[TrialRow, bytes]:
        task, started = self.tasks[attempt.index], time.monotonic()
        row = TrialRow(
            task=str(task.data.name or attempt.index),
            task_key=str(task.key),
            attempt=attempt.number,
            trial="",
            outcome=Outcome.agent_error,
            seconds=0.0,
        )
        try:
            episode = await self._episode(task, attempt.number)
        except RuntimeError as error:
            # The server's reply to a failed request; its text is the error message.
            outcome = Outcome.sandbox_error if isinstance(error, ServerLostError) else row.outcome
            return row.model_copy(update={"outcome": outcome, "error": " ".join(str(error).split())[:500]}), b""
        for trace in episode.traces:
            self.served.release(trace.id)
        packed = transcript_of(episode.traces[0]).packed() if episode.traces else b""
        return completed_row(row, episode, seconds=time.monotonic() - started), packed

    async def _episode(self, task: "Task", number: int) -> "WireEpisode":
        """Run a task once; again if the environment server ends meanwhile."""
        from harbortrainer.environment.taskset import request_data

        assert self.client is not None and self.remote is not None
        ends = 0
        while True:
            request = self.client.run(
                client=self.served.client,
                model=self.served.model,
                sampling=self._sampling(str(task.key), number),
                task_data=request_data(task, self.key, self.served.client),
            )
            try:
                return await self.remote.guard(request)
            except ServerLostError:
                if (ends := ends + 1) > MAX_SERVER_ENDS:
                    raise

    def _sampling(self, task_key: str, number: int):
        from harbortrainer.environment.verifiers_compat import SamplingConfig

        sampling = self.folder.spec.rules.sampling.to_sampling_args()
        extra = sampling.get("extra_body")
        given: Mapping[str, object] = extra if isinstance(extra, dict) else {}
        if self.served.seeded:
            from harbortrainer.engines.local.rollout_client import request_seed

            given = {**given, "seed": request_seed(self.folder.spec.rules.seed, task_key, number)}
        return SamplingConfig.model_validate(sampling | ({"extra_body": given} if given else {}))

    async def _check_server(self, row: TrialRow) -> None:
        """Stop the evaluation if the model's server is gone, since all remaining trials would fail."""
        self.misses = self.misses + 1 if row.outcome == Outcome.model_error else 0
        if self.misses < MAX_MISSES:
            return
        self.misses = 0
        try:
            await asyncio.to_thread(self.candidate.check)
        except UserError as error:
            kept = f"{len(self.folder.graded())} graded trials are kept in {self.folder.path}"
            do = f"{error.do}; {kept}; continue with the same command and --resume"
            raise UserError(error.what, where=error.where, do=do) from None


def completed_row(row: TrialRow, episode: "WireEpisode", *, seconds: float) -> TrialRow:
    """Return the row of a completed trial.

    Args:
        row: The row of the planned trial.
        episode: The episode from the environment server.
        seconds: Duration of the trial.
    """
    from harbortrainer.environment.episode_end import episode_outcome

    trace = episode.traces[0] if episode.traces else None
    record = record_of(trace) if trace else None
    outcome, error = episode_outcome(episode, record)
    found: dict[str, object] = {"outcome": outcome, "error": error, "seconds": seconds}
    if trace is not None:
        usages = [call.usage for call in trace.calls if call.usage is not None]
        found["reward"] = float(trace.reward) if outcome.trains else None
        found["turns"] = trace.num_turns
        found["prompt_tokens"] = sum(usage.input_tokens for usage in usages)
        found["sampled_tokens"] = sum(usage.completion_tokens for usage in usages)
    if record is not None:
        found |= {"trial": record.trial_name, "rewards": record.rewards}
        found["timings"] = {phase: seconds for phase, seconds in record.timings if seconds is not None}
    return TrialRow.model_validate(row.model_dump() | found)
