"""What the checks ask of a run file, and of the place it is to run in.

Invariant: reading a file here never fails; what it does not say has Prime-RL's or the plugin's default.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harbortrainer.config.reader import RawRun
from harbortrainer.engines.choice import Choice, Gpu
from harbortrainer.engines.prime_rl.place import Place

MAX_INFLIGHT = 1024
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
DEFAULT_TASKS = "datasets/harbor_tasks"
DEFAULT_PORT = 8000


@dataclass(frozen=True)
class Facts:
    """A run, an engine and a machine.

    Args:
        raw: The run file; none when only the machine is looked at.
        choice: The engine.
        place: Where Prime-RL should be.
        gpus: What `nvidia-smi` shows.
    """

    raw: RawRun | None
    choice: Choice
    place: Place
    gpus: list[Gpu] = field(default_factory=list)

    def get(self, dotted: str, default: Any = None) -> Any:
        """A key of the run file."""
        value = default if self.raw is None else self.raw.get(dotted)
        return default if value is None else value

    @property
    def prime_rl(self) -> bool:
        """Whether Prime-RL runs it."""
        return self.choice.engine == "prime-rl"

    @cached_property
    def sources(self) -> list[dict[str, Any]]:
        """Training and evaluation sources."""
        return [*self.get("orchestrator.train.source", []), *self.get("orchestrator.eval.source", [])]

    @cached_property
    def harnesses(self) -> list[dict[str, Any]]:
        """The harness tables of our sources."""
        agents = [source.get("env", {}).get("agent") or {} for source in self.sources]
        return [agent.get("harness") or {} for agent in agents]

    @cached_property
    def environment_types(self) -> list[str]:
        """Where sandboxes run."""
        return list(dict.fromkeys(harness.get("environment_type", "docker") for harness in self.harnesses))

    @cached_property
    def tasksets(self) -> list[dict[str, Any]]:
        """The taskset tables of our sources."""
        return [source.get("env", {}).get("taskset") or {} for source in self.sources]

    @property
    def model(self) -> str:
        """The policy's name."""
        return str(self.get("model.name", DEFAULT_MODEL))

    @property
    def run_dir(self) -> Path:
        """The run's folder, or the folder of runs when the run has no name yet."""
        return Path(self.get("output_dir", "outputs")) / str(self.get("run.dir", self.get("run.name", "")))

    @property
    def parallel(self) -> int:
        """Most trials in flight at once."""
        caps = [int(self.get("orchestrator.concurrency.max_inflight", MAX_INFLIGHT))]
        own = [int(harness["n_parallel_envs"]) for harness in self.harnesses if harness.get("n_parallel_envs")]
        if own and len(own) == len(self.harnesses):
            caps.append(max(own))  # sources share the places of a run
        return min(caps)

    @property
    def ports(self) -> dict[str, int]:
        """Ports the run will listen on, by what listens there."""
        url = self.get("orchestrator.model.client.base_url")
        if not self.prime_rl:
            return {"sampler": urlsplit(url).port or DEFAULT_PORT} if url else {}
        ports = {"env server 1": int(self.get("orchestrator.env_server_base_port", 5000))}
        for index in range(1, len(self.sources)):
            ports[f"env server {index + 1}"] = ports["env server 1"] + index
        if self.get("inference") is not None:
            ports["inference"] = int(self.get("inference.server.port", DEFAULT_PORT))
        return ports
