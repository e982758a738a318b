"""What the checks look at: a validated run, the engine for it, and the machine."""

from dataclasses import dataclass, field
from functools import cached_property

from harbortrainer.config.overrides import Override, place
from harbortrainer.config.plugin import AUTO, HarnessKeys, PluginEnv, TasksetKeys
from harbortrainer.config.prime_rl_run import PrimeRun, sources_of
from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.engine_choice import EngineChoice, Gpu
from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.sandbox.environment_choice import chosen
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_limits import played_by


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A run, an engine and a machine.

    Args:
        choice: The engine.
        checkout: Where Prime-RL should be.
        gpus: What `nvidia-smi` shows.
        file: The run file, as the user wrote its path.
        run: The file as the engine reads it; none when only the machine is looked at.
        envs: The plugin's tables by the dotted key of their `env`.
        resume: The run is to go on.
        overrides: What the command line changed in the file.
    """

    choice: EngineChoice
    checkout: Checkout
    gpus: list[Gpu]
    file: str = ""
    run: RunConfig | PrimeRun | None = None
    envs: dict[str, PluginEnv] = field(default_factory=dict)
    resume: bool = False
    overrides: tuple[Override, ...] = ()

    @property
    def on_prime_rl(self) -> bool:
        """Whether Prime-RL runs it."""
        return self.choice.engine == "prime-rl"

    def where(self, key: str) -> str:
        """A key of the run file, as a finding names it; one that the command line set is told so."""
        return place(self.file, key, self.overrides)

    @property
    def tasksets(self) -> dict[str, TasksetKeys]:
        """Our taskset tables by their dotted keys."""
        return {f"{key}.taskset": env.taskset for key, env in self.envs.items()}

    @cached_property
    def played(self) -> dict[str, list[TaskRef]]:
        """The tasks of our tasksets by their dotted keys; none where they cannot be read."""
        return played_by(self.tasksets)

    @cached_property
    def harnesses(self) -> dict[str, HarnessKeys]:
        """Our harness tables by their dotted keys."""
        seats = {f"{key}.agent.harness": env.agent for key, env in self.envs.items()}
        return {key: seat.harness for key, seat in seats.items() if seat.harness is not None}

    @cached_property
    def environment_types(self) -> dict[str, str]:
        """Where sandboxes run, and the first key that says so."""
        kinds: dict[str, str] = {}
        for key, harness in self.harnesses.items():
            for kind in self._kinds(key, harness):
                kinds.setdefault(kind, self.where(f"{key}.environment_type"))
        return kinds

    def _kinds(self, key: str, harness: HarnessKeys) -> list[str]:
        """What a harness plays in: with `auto`, what its tasks need."""
        if harness.environment_type != AUTO:
            return [harness.environment_type]
        tasks = self.played[f"{key.removesuffix('.agent.harness')}.taskset"]
        found = {chosen(task.path, AUTO, harness.environment_kwargs).kind for task in tasks}
        return sorted(found) or ["local"]

    @property
    def parallel(self) -> int | None:
        """Most trials in flight at once; none means no bound."""
        if self.run is None:
            return None
        own = [harness.n_parallel_envs for harness in self.harnesses.values() if harness.n_parallel_envs]
        bounds = [self.run.orchestrator.concurrency.max_inflight]
        if own and len(own) == len(sources_of(self.run)):
            bounds.append(max(own))  # sources share the places of a run
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def ports(self) -> list[tuple[str, int, str]]:
        """Ports the run will listen on: what listens there, the port, the key that sets it."""
        if isinstance(self.run, RunConfig):
            port = self.run.orchestrator.model.client.port
            return [("sampler", port, "orchestrator.model.client.base_url")] if port else []
        if self.run is None:
            return []
        first = self.run.orchestrator.env_server_base_port
        ports = [
            (f"env server {index + 1}", first + index, "orchestrator.env_server_base_port")
            for index in range(len(sources_of(self.run)))
        ]
        if self.run.inference is not None:
            ports.append(("inference", self.run.inference.server.port, "inference.server.port"))
        return ports
