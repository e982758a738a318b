"""Reads from a task's files which sandboxes it needs: one for the agent, and one for each separate verifier."""

from dataclasses import dataclass
from pathlib import Path

from harbortrainer.config.table import TomlTable, table_of, tables_of
from harbortrainer.harbor_compat import separate_verifier_can_use_environment


@dataclass(frozen=True)
class RequestedSandbox:
    """One sandbox of a task: for the agent, or for a separate verifier."""

    key: str
    """Key of its table in task.toml."""
    folder: Path
    """Its build context."""
    table: TomlTable

    @property
    def network(self) -> str:
        """Harbor's network mode."""
        legacy = "no-network" if self.table.get("allow_internet") is False else "public"
        return str(self.table.get("network_mode", legacy))

    @property
    def is_defined(self) -> bool:
        """Whether the task defines what the sandbox is made from."""
        return bool(self.table.get("docker_image")) or any(
            (self.folder / name).is_file() for name in ("Dockerfile", "docker-compose.yaml")
        )


def requested_sandboxes(folder: Path, config: TomlTable) -> list[RequestedSandbox]:
    """Return the task's sandboxes, the agent's first.

    Args:
        folder: The task's folder.
        config: The contents of its task.toml.
    """
    separate = [_verifier_sandbox(folder, config, step) for step in _verified(config) if _has_separate(config, step)]
    return [_agent_sandbox(folder, config), *separate]


def _verified(config: TomlTable) -> list[TomlTable]:
    """Return the steps, or an empty table for a task without steps."""
    return tables_of(config, "steps") or [{}]


def _agent_sandbox(folder: Path, config: TomlTable) -> RequestedSandbox:
    return RequestedSandbox("environment", folder / "environment", table_of(config, "environment"))


def _verifier_sandbox(folder: Path, config: TomlTable, step: TomlTable) -> RequestedSandbox:
    """Return the sandbox of a separate verifier, of a step or (empty) of the task.

    Its table is the first that is there: the step's, the task's verifier's, the environment's. Harbor 0.25 takes the
    image from the first place that defines one; 0.21 takes it from that table and the nearest folder of tests.
    """
    key = f"steps.{step['name']}.verifier.environment" if step else "verifier.environment"
    places = [(table_of(table_of(config, "verifier"), "environment"), folder / "tests")]
    if step:
        own = table_of(table_of(step, "verifier"), "environment")
        places.insert(0, (own, folder / "steps" / str(step["name"]) / "tests"))
    agent = _agent_sandbox(folder, config)
    table = next(filter(None, (own for own, _ in places)), agent.table)
    if not separate_verifier_can_use_environment():
        nearest = next((tests for _, tests in places if tests.is_dir()), folder / "tests")
        return RequestedSandbox(key, nearest, table)
    for own, tests in places:
        sandbox = RequestedSandbox(key, tests, table | {"docker_image": own.get("docker_image")})
        if sandbox.is_defined:
            return sandbox
    return RequestedSandbox(key, agent.folder, table | {"docker_image": agent.table.get("docker_image")})


def _has_separate(config: TomlTable, step: TomlTable) -> bool:
    """Whether the verifier of a step, or (empty) of the task, has a sandbox of its own."""
    modes = (_mode(table_of(part, "verifier")) for part in (step, config))
    return next(filter(None, modes), "shared") == "separate"


def _mode(verifier: TomlTable) -> str | None:
    """Return the mode that a verifier's table sets."""
    return verifier.get("environment_mode", "separate" if verifier.get("environment") is not None else None)
