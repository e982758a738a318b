"""A source at work: its tasks here, its environment behind a server, one episode a call.

As in Prime-RL the taskset is loaded in this process and each request carries its task's data. Training and
evaluation both go through verifiers' train client, so that what is measured is what is trained: the same tokens, the
same renderer, the same endpoint.
"""

import hashlib
from typing import Any

from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.serve import EnvClient
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

from harbortrainer.engines.local.learner.settings import LengthPenalty
from harbortrainer.errors import UserError


class Source:
    """The tasks of one source and the way to run them.

    Args:
        name: Its name in metrics.
        env: Its `env` table.
        sampling: Sampling arguments as Prime-RL sends them.
        group_size: Rollouts a task.
        ratio: Its weight among the training sources.
        count: Tasks that are used; -1 means all.
        penalty: What a trial's reward loses for length before the group's mean is taken.
    """

    def __init__(
        self,
        name: str,
        env: dict[str, Any],
        *,
        sampling: dict[str, Any],
        group_size: int,
        ratio: float = 1.0,
        count: int = -1,
        penalty: LengthPenalty | None = None,
    ) -> None:
        self.penalty = penalty
        self.name, self.sampling, self.group_size, self.ratio = name, sampling, group_size, ratio
        tasks = list(load_taskset(resolve_env_config(env).taskset))
        self.tasks = tasks if count < 0 else tasks[:count]
        if not self.tasks:
            raise UserError("no tasks", where=f"source {name!r}", do="point tasks_dir at a folder of tasks")
        self.client: EnvClient | None = None
        self.policy: TrainClientConfig | None = None
        self.model = ""

    @property
    def temperature(self) -> float:
        """What tokens are sampled at."""
        value = self.sampling.get("temperature")
        return 1.0 if value is None else float(value)

    async def connect(self, address: str, policy: TrainClientConfig, model: str, within: float) -> None:
        """Connect to the environment's server, and tell it where the policy is served under which name."""
        self.policy, self.model = policy, model
        self.client = EnvClient(address=address)
        await self.client.wait_for_server_startup(timeout=within, interval=0.5)

    async def run(self, index: int, *, seed: int | None = None) -> Any:
        """Play task `index` once.

        Args:
            index: Which of `tasks`.
            seed: Seed of every request of this rollout; None leaves it to the sampler.

        Returns:
            verifiers' episode.
        """
        assert self.client is not None and self.policy is not None
        extra = dict(self.sampling.get("extra_body") or {})
        if seed is not None:
            extra["seed"] = seed
        return await self.client.run(
            client=self.policy,
            model=self.model,
            sampling=SamplingConfig.model_validate({**self.sampling, "extra_body": extra}),
            task_data=self.tasks[index].data.model_dump(mode="json"),
        )

    def name_of(self, index: int) -> str:
        """The task's name."""
        return str(self.tasks[index].data.name or index)

    def key_of(self, index: int) -> str:
        """The task's content hash."""
        return str(self.tasks[index].key)

    async def close(self) -> None:
        """Let go of the server."""
        if self.client is not None:
            await self.client.close()
            self.client = None


def request_seed(*parts: object) -> int:
    """A seed that follows from `parts` alone.

    Example:
        >>> request_seed(0, "task", 1) == request_seed(0, "task", 1)
        True
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
