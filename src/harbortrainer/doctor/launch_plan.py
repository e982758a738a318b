"""The input of the checks: a validated run, its engine and this machine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from harbortrainer.config.environment_table import EnvironmentEntry, environment_entry
from harbortrainer.config.overrides import Override, setting_location
from harbortrainer.config.plugin import HarnessKeys, PluginEnv, TasksetKeys
from harbortrainer.config.prime_rl_key_names import Release, newer_key
from harbortrainer.config.prime_rl_run import PrimeRun, sources_of
from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.engine_choice import EngineChoice, Gpu
from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.tasks.task_errors import inspected
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_limits import tasks_by_taskset


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A run, its engine and this machine.

    Args:
        choice: The engine and the reason for it.
        checkout: The checkout of Prime-RL.
        gpus: The GPUs that `nvidia-smi` shows.
        file: Path of the run file, as the user wrote it.
        release: The Prime-RL whose keys the file has.
        run: The run file as the engine reads it; None to check only the machine.
        envs: The plugin's `env` tables by their dotted keys.
        resume: The run continues an earlier one.
        overrides: Keys that the command line overrides.
    """

    choice: EngineChoice
    checkout: Checkout
    gpus: list[Gpu]
    file: str = ""
    release: Release = "pin"
    run: RunConfig | PrimeRun | None = None
    envs: dict[str, PluginEnv] = field(default_factory=dict)
    resume: bool = False
    overrides: tuple[Override, ...] = ()

    @property
    def on_prime_rl(self) -> bool:
        """Whether the engine is Prime-RL."""
        return self.choice.engine == "prime-rl"

    def where(self, key: str) -> str:
        """Name a key of the run file for a message, or the option that overrides it."""
        return setting_location(self.file, key if self.release == "pin" else newer_key(key), self.overrides)

    @property
    def tasksets(self) -> dict[str, TasksetKeys]:
        """The plugin's taskset tables by their dotted keys."""
        return {f"{key}.taskset": env.taskset for key, env in self.envs.items()}

    @cached_property
    def tasks(self) -> dict[str, list[TaskRef]]:
        """The tasks of each taskset, by the taskset's dotted key; empty where they cannot be read."""
        return tasks_by_taskset(self.tasksets)

    @property
    def training_tasks(self) -> list[TaskRef]:
        """The tasks of all training sources, each once."""
        found = [tasks for key, tasks in self.tasks.items() if key.startswith("orchestrator.train.")]
        return list({task.path: task for tasks in found for task in tasks}.values())

    @cached_property
    def harnesses(self) -> dict[str, HarnessKeys]:
        """The plugin's harness tables by their dotted keys."""
        agents = {f"{key}.agent.harness": env.agent for key, env in self.envs.items()}
        return {key: agent.harness for key, agent in agents.items() if agent.harness is not None}

    @cached_property
    def remote_servers(self) -> dict[str, str]:
        """Addresses of the environment servers that this run does not start, by the dotted key of their source."""
        sources = sources_of(self.run) if self.run is not None else {}
        return {key: str(source.serve["address"]) for key, source in sources.items() if source.serve.get("address")}

    @cached_property
    def environment_types(self) -> dict[str, str]:
        """The environment types of the trials that run on this machine, each with the first key that selects it."""
        types: dict[str, str] = {}
        for key, harness in self.harnesses.items():
            if key.removesuffix(".env.agent.harness") in self.remote_servers:
                continue
            for kind in self._types(key, harness):
                types.setdefault(kind, self.where(f"{key}.environment_type"))
        return types

    def _types(self, key: str, harness: HarnessKeys) -> list[str]:
        """Return the environment types of a harness; with `auto`, the types that its tasks need."""
        candidates = environment_entry(harness.environment_type).chosen_from
        if candidates is None:
            return [harness.environment_type]
        tasks = self.tasks[f"{key.removesuffix('.agent.harness')}.taskset"]
        placed = inspected(tasks, harness.environment_type, harness.environment_kwargs)
        found = {choice.kind for _, choice, _ in placed}
        return sorted(found) or [candidates[0]]

    def key_of_type(self, has: Callable[[EnvironmentEntry], bool]) -> str | None:
        """The first key that selects an environment type whose entry satisfies `has`; None if there is none."""
        return next((where for kind, where in self.environment_types.items() if has(environment_entry(kind))), None)

    @property
    def parallel(self) -> int | None:
        """Max trials in flight; None means unlimited."""
        if self.run is None:
            return None
        own = [harness.n_parallel_envs for harness in self.harnesses.values() if harness.n_parallel_envs]
        bounds = [self.run.orchestrator.concurrency.max_inflight]
        if own and len(own) == len(sources_of(self.run)):
            bounds.append(max(own))  # the sources of a run share its trial slots
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def ports(self) -> list[tuple[str, int, str]]:
        """Ports that the run will listen on: the listener's name, the port, the key that sets it."""
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
