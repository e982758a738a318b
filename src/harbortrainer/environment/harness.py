"""The verifiers harness: one rollout is one Harbor trial, run in this process, with a cap on concurrent trials.

- `HarborHarness.launch` runs the trial. Model calls go to verifiers' interception endpoint; with
  `capture = "rollout_details"` they go straight to the server, and its token ids are committed afterwards.
- The trial's record is put on `trace.info["harbor"]`. A trial that does not train is an error of the trace, never a
  reward.
- `slot` caps concurrent trials over several processes with numbered lock files in a shared folder. A killed process
  frees its slots: the kernel drops its locks, and the files are close-on-exec, so no sandbox keeps one locked. Over NFS
  the kernel asks the server for these locks, so the cap then holds over machines.

Invariant: importing this module imports neither harbor nor litellm; the first `launch` does, or
`environment.import_trial_modules`.
"""

import asyncio
import os
import random
import shutil
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

from pydantic import SecretStr
from verifiers.v1.clients import ModelContext
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from harbortrainer.config.agent_table import needs_proxy
from harbortrainer.config.trusted_tasks import is_trusted
from harbortrainer.environment.model_proxy.server import ModelProxy
from harbortrainer.environment.model_server import WorkerState
from harbortrainer.environment.outcome_review import OutcomeReviewer
from harbortrainer.environment.plugin_config import HarborHarnessConfig
from harbortrainer.environment.rollout_details import direct_kwargs
from harbortrainer.environment.rollout_state import TrialFailedError, harbor_state, trace_error
from harbortrainer.environment.taskset import HarborTaskData
from harbortrainer.runs.locks import POLL_S, NoLocksError, try_lock
from harbortrainer.sandbox import container_sockets
from harbortrainer.sandbox.environment_types import choose_environment
from harbortrainer.trials.outcome import START_TIMEOUT, STOP_OF_LIMIT, Outcome
from harbortrainer.trials.record import INFO_KEY, TrialRecord, record_of
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.sandbox_starts import CURRENT, Start
from harbortrainer.trials.secrets import NO_KEY
from harbortrainer.trials.trial_spec import ModelEndpoint, TrialSpec

_TRIES = 24
"""Slots that one poll tries."""
_MOST_S = 0.005
"""Seconds after which a poll ends, for file systems on which each lock is a request to a server."""

# One queue per event loop, so that only one waiter per process polls the lock files.
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Path, int], "Slots"]] = WeakKeyDictionary()


@asynccontextmanager
async def slot(folder: Path, n: int | None) -> AsyncGenerator[None]:
    """Hold one of the `n` slots that all processes with this trials `folder` share; None means no cap."""
    if n is None:
        yield
        return
    shared = _slots.setdefault(asyncio.get_running_loop(), {})
    if (folder, n) not in shared:
        shared[folder, n] = Slots(folder / ".slots", n)
    async with shared[folder, n].hold():
        yield


class Slots:
    """The slots of one folder, as seen by one process.

    A waiter polls: each poll tries a few of the other processes' slots, so that it costs the same with any number of
    slots. A released slot goes to whichever process finds it first.
    """

    def __init__(self, folder: Path, n: int) -> None:
        self._folder, self._n = folder, n
        self._prefix = str(folder / "slot-")
        self._queue = asyncio.Lock()
        self._held: set[int] = set()
        self._next = random.randrange(n)

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[int]:
        """Hold a free slot, waiting in order of arrival within the process. Yields its number.

        Raises:
            NoLocksError: The folder's file system has no locks.
        """
        async with self._queue:
            number, file = await self._take()
        try:
            yield number
        finally:
            os.close(file)  # which releases its lock
            self._held.discard(number)

    async def _take(self) -> tuple[int, int]:
        """Wait for a free slot. Returns its number and its file."""
        await asyncio.sleep(0)  # a thousand trials that start at once do not block the event loop together
        while True:
            if (taken := self._poll()) is not None:
                self._held.add(taken[0])
                return taken
            await asyncio.sleep(POLL_S)

    def _poll(self) -> tuple[int, int] | None:
        """Try a few slots. Returns the first free one and its file, None if there was none."""
        end, tries = time.monotonic() + _MOST_S, min(_TRIES, self._n - len(self._held))
        while tries > 0 and time.monotonic() < end:
            number, self._next = self._next, (self._next + 1) % self._n
            if number in self._held:
                continue
            tries -= 1
            if (file := self._lock(number)) is not None:
                return number, file
        return None

    def _lock(self, number: int) -> int | None:
        """Lock the file of a slot. Returns it, None if another process holds the slot."""
        file = self._open(number)
        try:
            if try_lock(file):
                return file
        except NoLocksError as error:
            os.close(file)
            do = "set trials_dir to another folder, or use orchestrator.concurrency.max_inflight, not n_parallel_envs"
            raise NoLocksError(self._folder, do=do) from error
        os.close(file)
        return None

    def _open(self, number: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(f"{self._prefix}{number}", flags, 0o666)
        except FileNotFoundError:
            self._folder.mkdir(parents=True, exist_ok=True)
            return os.open(f"{self._prefix}{number}", flags, 0o666)


class HarborHarness(Harness[HarborHarnessConfig]):
    """A harness that runs a Harbor task as a Harbor trial.

    Attributes:
        worker_state: State shared by the worker's trials. The environment replaces the initial one with its own.
    """

    # The model's commands run in the trial's sandbox. verifiers' runtime is only this process.
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: HarborHarnessConfig) -> None:
        super().__init__(config)
        self.worker_state = WorkerState(config)

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Run the trial. Put its record on the trace and its failure, if any, on the state."""
        if not isinstance(data, HarborTaskData):
            raise TypeError("harbor_env runs Harbor tasks only; use it with the taskset harbor_env")
        state = harbor_state(trace)
        await asyncio.sleep(state.attempts.pause_s)
        spec = self._spec(ctx, trace, data, state.folder or Path(data.path), endpoint, secret)
        try:
            async with self._model_proxy(spec) as proxy:
                record = await self._run_trial(ctx, trace, spec, proxy)
        except NoLocksError as error:  # of the slots or the starts: no sandbox was started
            raise TrialFailedError(f"{Outcome.sandbox_error}: {error}") from error
        record.failed_attempts = state.attempts.count
        attach_record(trace, record)
        state.failure = trace_error(record, state.attempts)
        return ProgramResult(exit_code=0, stdout="", stderr="")

    async def _run_trial(
        self, ctx: ModelContext, trace: Trace, spec: TrialSpec, proxy: ModelProxy | None
    ) -> TrialRecord:
        state = harbor_state(trace)
        wrong_logprobs = ""
        if spec.model is not None and spec.uses_model:
            spec.model.context_limit = await self.worker_state.readiness.prepare(ctx)
            wrong_logprobs = await self.worker_state.logprobs.fault(ctx)
        review = OutcomeReviewer(self.config, ctx, trace, spec, self.worker_state.latencies(ctx), proxy, wrong_logprobs)
        async with slot(self.config.trials_folder, self.config.n_parallel_envs):
            waited_s, excused = 0.0, 0
            while True:
                start = await self.worker_state.starts.admit(spec.task_key) if self.worker_state.starts else Start()
                CURRENT.set(start)
                try:
                    record = await run_trial(
                        spec,
                        on_event=state.phases.on_event,
                        stop=lambda: trace.stop_condition,
                        review=review,
                        proxy=proxy,
                    )
                finally:
                    start.end()
                if record.error is not None and record.error.type == START_TIMEOUT:
                    await start.count_timeout(record.error.message)
                waited_s += start.waited_s
                if not start.excused:
                    record.start_wait_s, record.excused_starts = waited_s, excused
                    return record
                excused += 1
                if record.trial_dir is not None:  # the next start has the same name
                    await asyncio.to_thread(shutil.rmtree, record.trial_dir, ignore_errors=True)

    @asynccontextmanager
    async def _model_proxy(self, spec: TrialSpec) -> AsyncGenerator[ModelProxy | None]:
        """Start the model proxy of an agent that may run inside its sandbox, and write its address into `spec`.

        Yields None for other agents: they call the endpoint from this process.
        """
        if spec.model is None or self.config.capture != "interception" or not needs_proxy(spec.agent):
            yield None
            return
        kind = choose_environment(spec.task_dir, spec.environment_type, spec.environment_kwargs).kind
        host, name = await container_sockets.host_address(kind)
        secret = spec.model.api_key.get_secret_value()
        async with ModelProxy(spec.model.base_url, secret, host=host, name=name, trial=spec.trial_name) as proxy:
            spec.model.base_url, spec.model.api_key = proxy.url, proxy.key
            yield proxy

    def _spec(
        self, ctx: ModelContext, trace: Trace, data: HarborTaskData, folder: Path, endpoint: str, secret: str
    ) -> TrialSpec:
        """Return the spec of the rollout's trial."""
        config = self.config
        direct = config.capture == "rollout_details"
        limits = [limit for limit in (config.max_turns, trace.agent.config.max_turns) if limit is not None]
        kwargs = direct_kwargs(ctx.sampling, config.agent_kwargs) if direct else {}
        return TrialSpec(
            task_dir=folder,
            task_key=data.task_key,
            trials_dir=config.trials_folder,
            trial_name=f"{(data.name or 'task').replace('/', '.')[:32]}__{trace.id[:12]}",
            agent=config.agent,
            agent_kwargs=config.agent_kwargs | kwargs,
            agent_env=config.resolved_env,
            model=ModelEndpoint(
                name=config.model_name or ctx.model,
                base_url=config.vllm_base_url or endpoint,
                api_key=SecretStr(NO_KEY if direct else secret),
                output_limit=ctx.sampling.max_tokens,
            ),
            max_turns=min(limits, default=None),
            environment_type=config.environment_type,
            environment_kwargs=config.environment_kwargs,
            trusted=is_trusted(data.name or "", config.trusted_tasks),
            timeout_multiplier=config.timeout_multiplier,
            reward_bound=config.reward_bound,
            reward_key=config.reward_key,
            leftovers=config.leftovers,
            keep_trials=config.keep_trials,
            keep_trials_mb=config.keep_trials_mb,
        )

    async def cleanup(self, trace: Trace, runtime: Runtime) -> None:
        """Record the outcome's error of a failed trial even if verifiers recorded another error first."""
        error = harbor_state(trace).failure if record_of(trace) is not None else None
        if error is not None and not any(known.message == str(error) for known in trace.errors):
            trace.record_error(error)


def attach_record(trace: Trace, record: TrialRecord) -> None:
    """Put the record on the trace as plain JSON, and its numbers among the trace's metrics.

    If a limit ended the trial, the trace is stopped with that limit: verifiers itself sees only the limits that its own
    endpoint enforces.
    """
    trace.info[INFO_KEY] = record.to_json()
    trace.record_metrics(record.metrics())
    if (limit := STOP_OF_LIMIT.get(record.outcome)) is not None:
        trace.stop(limit)
