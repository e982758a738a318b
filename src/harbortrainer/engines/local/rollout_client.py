"""The client of the environment servers: runs a task of a source and returns a `Rollout`.

As in Prime-RL, this process loads the taskset, and each request carries its task's data. Training and evaluation both
use verifiers' train client, so they have the same tokens, renderer and endpoint.

Invariants:

- `RolloutClient` returns every rollout that it starts, also a failed one, with its outcome. It raises only for
  cancellation, a failed log-probability check and a server that exited.
- Completions of failed attempts stay in the completion log until all rollouts that were in flight then have ended.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable

from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve import EnvClient
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

from harbortrainer.config.algorithm_config import Algo
from harbortrainer.config.orchestrator_config import EvalSource, TrainSource
from harbortrainer.engines.env_server.remote_server import RemoteServer, ServerLostError
from harbortrainer.engines.local.protocols import CompletionLogProtocol
from harbortrainer.engines.local.rollouts.curriculum import Curriculum
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.rollouts.trace_samples import fill_rollout
from harbortrainer.environment.request_check import RunKey
from harbortrainer.environment.taskset import HarborTaskset, request_data
from harbortrainer.environment.verifiers_compat import SamplingConfig
from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.runs.live_status import ActiveTrial
from harbortrainer.runs.provenance import TaskOrigin
from harbortrainer.trials.outcome import Outcome

CONNECT_S = 120.0
"""Seconds to wait for a server that this run did not start."""


class TaskStream:
    """The tasks of one source, and the connection to its environment server.

    Args:
        config: The source's table.
        count: Number of tasks to use; -1 means all.
        algo: The algorithm: how rewards become advantages, and which roles are predicted.
    """

    def __init__(self, config: TrainSource | EvalSource, *, count: int = -1, algo: Algo | None = None) -> None:
        self.config, self.algo = config, algo or Algo()
        self.name, self.group_size = config.resolved_name, config.group_size
        self.sampling = config.sampling.to_sampling_args()
        taskset = load_taskset(resolve_env_config(config.env).taskset)
        tasks = list(taskset)
        self.selection, measured = (
            (taskset.selection, taskset.measured_rewards()) if isinstance(taskset, HarborTaskset) else (None, {})
        )
        self.tasks = tasks if count < 0 else tasks[:count]
        if not self.tasks:
            raise UserError("no tasks", where=f"source {self.name!r}", do="set tasks_dir to a folder with tasks")
        curriculum = config.curriculum if isinstance(config, TrainSource) else None
        self.curriculum = Curriculum(curriculum, [self.key_of(index) for index in range(len(self.tasks))], measured)
        self.client: EnvClient | None = None
        self.policy: TrainClientConfig | None = None
        self.model = ""
        self.key: RunKey | None = None
        self._server: RemoteServer | None = None

    @property
    def alive(self) -> bool:
        """False if the server is at an address of the run file and has been silent for too long."""
        return self._server is None or self._server.alive

    def exit_error(self) -> RunStoppedError:
        """Return the error of a silent server."""
        assert self._server is not None
        return self._server.exit_error()

    @property
    def temperature(self) -> float:
        """Sampling temperature; 1.0 by default."""
        value = self.config.sampling.temperature
        return 1.0 if value is None else value

    async def connect(self, address: str, policy: TrainClientConfig, model: str, key: RunKey, within: float) -> None:
        """Connect to the environment server.

        Args:
            address: The server's address.
            policy: Endpoint and renderer of the policy, for its requests.
            model: Name of the policy at the endpoint.
            key: The run's key, which signs the requests.
            within: Seconds to wait for the server.
        """
        self.policy, self.model, self.key, self.client = policy, model, key, EnvClient(address=address)
        within = min(within, CONNECT_S) if self.config.serve.get("address") else within
        try:
            await self.client.wait_for_server_startup(timeout=within, interval=0.5)
        except TimeoutError:
            raise RemoteServer.unreachable(self.name, address) from None
        self._server = RemoteServer(self.name, self.client, may_be_silent=not self.config.serve.get("address"))

    async def run(self, index: int, *, seed: int | None = None) -> WireEpisode:
        """Run task `index` once.

        Args:
            index: Index into `tasks`.
            seed: Seed of every request of this rollout; None lets the sampler choose.
        """
        assert self.client is not None and self.policy is not None and self.key is not None and self._server is not None
        given = self.sampling.get("extra_body")
        extra = (given if isinstance(given, dict) else {}) | ({} if seed is None else {"seed": seed})
        request = self.client.run(
            client=self.policy,
            model=self.model,
            sampling=SamplingConfig.model_validate({**self.sampling, "extra_body": extra}),
            task_data=request_data(self.tasks[index], self.key, self.policy),
        )
        return await self._server.guard(request)

    def rollout(self, index: int) -> Rollout:
        """Return a rollout of task `index` with its source and task only."""
        task = str(self.tasks[index].data.name or index)
        return Rollout(source=self.name, task=task, task_key=self.key_of(index), outcome=Outcome.agent_error)

    def key_of(self, index: int) -> str:
        """Return the task's content hash."""
        return str(self.tasks[index].key)

    def keys(self) -> dict[str, str]:
        """Return the content hash of every task, by name."""
        return {str(task.data.name or index): str(task.key) for index, task in enumerate(self.tasks)}

    def origin(self) -> TaskOrigin:
        """Return where the tasks came from; "another plugin" if the taskset is not ours."""
        if self.selection is None:
            return TaskOrigin(source="another plugin")
        return TaskOrigin(source=self.selection.source, left_out=self.selection.left_out)

    async def close(self) -> None:
        """Disconnect from the server."""
        if self._server is not None:
            await self._server.close()
            self._server = None
        if self.client is not None:
            await self.client.close()
            self.client = None


class RolloutClient:
    """Runs tasks, with a limit on the rollouts in flight.

    Args:
        completion_log: The sampler's completion log.
        seq_len: Maximum tokens of a sample.
        max_inflight: Maximum rollouts in flight; None means no limit.
    """

    def __init__(self, completion_log: CompletionLogProtocol, *, seq_len: int, max_inflight: int | None) -> None:
        self.completion_log, self.seq_len = completion_log, seq_len
        self.slots = asyncio.Semaphore(max_inflight or 1_000_000)
        self._began: list[int] = []  # total of the completion log when each rollout in flight began
        self._busy_s, self._since = 0.0, 0.0
        self._discarded_tokens = completion_log.discarded_tokens
        self.in_flight: list[ActiveTrial] = []
        """The rollouts in flight, the oldest first."""

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one rollout was in flight."""
        return self._busy_s + (time.monotonic() - self._since if self._began else 0.0)

    def take_discarded_tokens(self) -> int:
        """Return the number of tokens since the last call that were sampled for no trial that returned."""
        before, self._discarded_tokens = self._discarded_tokens, self.completion_log.discarded_tokens
        return self._discarded_tokens - before

    async def run_rollout(
        self,
        stream: TaskStream,
        index: int,
        *,
        seed: int | None = None,
        on_start: Callable[[], object] = lambda: None,
    ) -> Rollout:
        """Run task `index` of a source once, when there is a free slot; `on_start` is called then.

        Raises:
            ProofError: The trace and the completion log do not match.
        """
        async with self.slots:
            on_start()
            self._since = self._since if self._began else time.monotonic()
            began = self.completion_log.total
            self._began.append(began)
            active = ActiveTrial(task=stream.rollout(index).task, since=time.time())
            self.in_flight.append(active)
            try:
                return await self._run_task(stream, index, seed)
            finally:
                self._began.remove(began)
                self.in_flight.remove(active)
                self._busy_s += 0.0 if self._began else time.monotonic() - self._since
                # An episode has its last attempt only; completions older than all rollouts in flight are unused.
                self.completion_log.evict(min(self._began, default=self.completion_log.total))

    async def _run_task(self, stream: TaskStream, index: int, seed: int | None) -> Rollout:
        rollout = stream.rollout(index)
        try:
            episode = await stream.run(index, seed=seed)
        except RuntimeError as error:
            # The server's reply to a request that it could not serve.
            rollout.error = " ".join(str(error).split())[:500]
            rollout.server_lost = isinstance(error, ServerLostError)
            rollout.outcome = Outcome.sandbox_error if rollout.server_lost else rollout.outcome
            return rollout
        completions = [entry for trace in episode.traces for entry in self.completion_log.pop(trace.id)]
        rollout.logged_tokens = sum(len(entry.token_ids) for entry in completions)
        # In a thread, since long traces take a while and would block the event loop.
        return await asyncio.to_thread(
            fill_rollout,
            rollout,
            episode,
            completions,
            temperature=stream.temperature,
            seq_len=self.seq_len,
            roles=stream.algo.role_weights,
        )


def request_seed(*parts: object) -> int:
    """Return a seed that depends on `parts` only.

    Example:
        >>> request_seed(0, "task", 1) == request_seed(0, "task", 1)
        True
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
