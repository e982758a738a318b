"""Playing tasks: a source at work, and how one of its tasks becomes a `Rollout`.

As in Prime-RL the taskset is loaded in this process and each request carries its task's data. Training and evaluation
both go through verifiers' train client, so that what is measured is what is trained: the same tokens, the same
renderer, the same endpoint. Invariant of `Player`: every rollout that is started comes back, as a result or as a
failure with its outcome; only cancellation, a proof that fails, and a server that is gone come out as exceptions. What
an attempt that failed had sampled stays in the ledger until every rollout has ended that was under way beside it.
"""

import asyncio
import hashlib
import time

from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve import EnvClient
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

from harbortrainer.config.algo_table import Algo
from harbortrainer.config.source_table import EvalSource, TrainSource
from harbortrainer.engines.local.parts import LedgerPart
from harbortrainer.engines.local.rollouts.curriculum import Curriculum
from harbortrainer.engines.local.rollouts.rollout import Rollout, finished
from harbortrainer.environment.taskset import HarborTaskset
from harbortrainer.errors import UserError
from harbortrainer.runs.ingredients import TaskOrigin
from harbortrainer.trials.outcome import Outcome


class TaskStream:
    """The tasks of one source and the way to run them.

    Args:
        config: The source's table.
        count: Tasks that are used; -1 means all.
        algo: What makes an advantage of a group's rewards, and whose messages are predicted.
    """

    def __init__(self, config: TrainSource | EvalSource, *, count: int = -1, algo: Algo | None = None) -> None:
        self.config, self.algo = config, algo or Algo()
        self.name, self.group_size = config.resolved_name, config.group_size
        self.sampling = config.sampling.to_sampling_args()
        taskset = load_taskset(resolve_env_config(config.env).taskset)
        tasks = list(taskset)
        self.played, measured = (
            (taskset.played, taskset.measured()) if isinstance(taskset, HarborTaskset) else (None, {})
        )
        self.tasks = tasks if count < 0 else tasks[:count]
        if not self.tasks:
            raise UserError("no tasks", where=f"source {self.name!r}", do="point tasks_dir at a folder of tasks")
        asked = config.curriculum if isinstance(config, TrainSource) else None
        self.curriculum = Curriculum(asked, [self.key_of(index) for index in range(len(self.tasks))], measured)
        self.client: EnvClient | None = None
        self.policy: TrainClientConfig | None = None
        self.model = ""

    @property
    def temperature(self) -> float:
        """What tokens are sampled at."""
        value = self.config.sampling.temperature
        return 1.0 if value is None else value

    async def connect(self, address: str, policy: TrainClientConfig, model: str, within: float) -> None:
        """Connect to the environment's server, and tell it where the policy is served under which name."""
        self.policy, self.model, self.client = policy, model, EnvClient(address=address)
        await self.client.wait_for_server_startup(timeout=within, interval=0.5)

    async def run(self, index: int, *, seed: int | None = None) -> WireEpisode:
        """Play task `index` once.

        Args:
            index: Which of `tasks`.
            seed: Seed of every request of this rollout; None leaves it to the sampler.
        """
        assert self.client is not None and self.policy is not None
        given = self.sampling.get("extra_body")
        extra = (given if isinstance(given, dict) else {}) | ({} if seed is None else {"seed": seed})
        return await self.client.run(
            client=self.policy,
            model=self.model,
            sampling=SamplingConfig.model_validate({**self.sampling, "extra_body": extra}),
            task_data=self.tasks[index].data.model_dump(mode="json"),
        )

    def rollout(self, index: int) -> Rollout:
        """A rollout of which nothing is known yet but source and task."""
        task = str(self.tasks[index].data.name or index)
        return Rollout(source=self.name, task=task, task_key=self.key_of(index), outcome=Outcome.agent_error)

    def key_of(self, index: int) -> str:
        """The task's content hash."""
        return str(self.tasks[index].key)

    def keys(self) -> dict[str, str]:
        """The content hash of every task, by name."""
        return {str(task.data.name or index): str(task.key) for index, task in enumerate(self.tasks)}

    def origin(self) -> TaskOrigin:
        """Where the tasks came from; another plugin's are named by it alone."""
        if self.played is None:
            return TaskOrigin(source="another plugin")
        return TaskOrigin(source=self.played.source, left_out=self.played.left_out)

    async def close(self) -> None:
        """Let go of the server."""
        if self.client is not None:
            await self.client.close()
            self.client = None


class Player:
    """Plays tasks, with a bound on how many are in flight.

    Args:
        ledger: The sampler's ledger.
        seq_len: Most tokens of a sample.
        max_inflight: Most rollouts at once; None means no bound of our own.
    """

    def __init__(self, ledger: LedgerPart, *, seq_len: int, max_inflight: int | None) -> None:
        self.ledger, self.seq_len = ledger, seq_len
        self.slots = asyncio.Semaphore(max_inflight or 1_000_000)
        self._began: list[int] = []  # what the ledger had ever held when each rollout in flight began
        self._busy_s, self._since = 0.0, 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one rollout was in flight."""
        return self._busy_s + (time.monotonic() - self._since if self._began else 0.0)

    async def play(self, stream: TaskStream, index: int, *, seed: int | None = None) -> Rollout:
        """Play task `index` of a source once, when there is a free slot.

        Raises:
            ProofError: The trace holds tokens that the sampler did not sample.
        """
        async with self.slots:
            self._since = self._since if self._began else time.monotonic()
            began = self.ledger.entered
            self._began.append(began)
            try:
                return await self._play(stream, index, seed)
            finally:
                self._began.remove(began)
                self._busy_s += 0.0 if self._began else time.monotonic() - self._since
                # An episode names only its last attempt. What was sampled before every rollout in flight is none's.
                self.ledger.forget(min(self._began, default=self.ledger.entered))

    async def _play(self, stream: TaskStream, index: int, seed: int | None) -> Rollout:
        rollout = stream.rollout(index)
        try:
            episode = await stream.run(index, seed=seed)
        except RuntimeError as error:
            # What the server answers to a request that it could not serve; its word is the message.
            rollout.error = " ".join(str(error).split())[:500]
            return rollout
        completions = [entry for trace in episode.traces for entry in self.ledger.take(trace.id)]
        # Long traces take a while to walk; the event loop has requests to answer.
        return await asyncio.to_thread(
            finished,
            rollout,
            episode,
            completions,
            temperature=stream.temperature,
            seq_len=self.seq_len,
            roles=stream.algo.role_weights,
        )


def request_seed(*parts: object) -> int:
    """A seed that follows from `parts` alone.

    Example:
        >>> request_seed(0, "task", 1) == request_seed(0, "task", 1)
        True
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
