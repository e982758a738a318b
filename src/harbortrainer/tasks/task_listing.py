"""The listing of a task: its requirements, its known results and its tags.

`task_row` reads a task.toml with Harbor's own models and defaults. `read_tags` reads tags, category and difficulty.
"""

import tomllib
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from harbortrainer.config.explain import explain
from harbortrainer.errors import UserError
from harbortrainer.sandbox import dockerfile
from harbortrainer.sandbox.compose_files import compose_files
from harbortrainer.sandbox.errors_and_changes import SandboxBuildError
from harbortrainer.sandbox.task_requirements import TaskRequirements
from harbortrainer.tasks.measured_rates import MeasuredRate
from harbortrainer.tasks.task_folder import TASK_FILE, TaskRef

if TYPE_CHECKING:
    from harbor.models.task.config import TaskConfig


class TaskRow(BaseModel):
    """A row of `harbortrainer tasks list`."""

    name: str
    task_key: str
    """Hash of the task's content."""
    steps: int
    verifier: str
    """`shared`, `separate`, or both if the steps differ."""
    image: str
    """Source of the agent's sandbox: an image, `compose`, or nothing."""
    network: str
    """Network mode of the agent's sandbox."""
    cpus: int | None
    memory_mb: int | None
    storage_mb: int | None
    gpus: int | None
    agent_s: float | None
    """Time limit of the agent over all steps, in seconds; None without a limit."""
    verifier_s: float
    """Time limit of the verifier over all steps, in seconds."""
    build_s: float
    """Time limit for building the environment, in seconds."""
    exposure: list[str]
    """Access to this machine that the task's sandboxes would get; a run refuses such a task unless it is trusted."""
    checked: list[str]
    """Environment types in which the task's current content passed `tasks check` on this machine."""
    pass_rate: float | None = None
    """Measured share of solved attempts; None if the current content was not measured."""
    attempts: int | None = None
    """Attempts behind `pass_rate`."""


@lru_cache(maxsize=4096)
def harbor_config(task: TaskRef) -> "TaskConfig":
    """Return a task's configuration with Harbor's defaults.

    Raises:
        UserError: Harbor rejects the task.toml.
    """
    from harbor.models.task.config import TaskConfig

    try:
        with warnings.catch_warnings(action="ignore"):
            return TaskConfig.model_validate(task.config)
    except ValidationError as error:
        raise explain(error, str(task.path / TASK_FILE)) from None


def task_row(task: TaskRef, checked: Mapping[str, Sequence[str]], rates: Mapping[str, MeasuredRate]) -> TaskRow:
    """Return the row of a task.

    Args:
        task: The task.
        checked: Environment types in which tasks passed the check, by task key.
        rates: Measured pass rates by task key.

    Raises:
        UserError: Harbor rejects the task.toml.
    """
    from harbor.models.task.verifier_mode import task_has_any_separate_verifier, task_has_any_shared_verifier

    config = harbor_config(task)
    modes = {"shared": task_has_any_shared_verifier(config), "separate": task_has_any_separate_verifier(config)}
    parts = config.steps or [config]
    agent = {part.agent.network_mode or config.agent.network_mode or config.environment.network_mode for part in parts}
    limits = [config.agent.timeout_sec if part.agent.timeout_sec is None else part.agent.timeout_sec for part in parts]
    rate = rates.get(task.key)
    return TaskRow(
        name=task.name,
        task_key=task.key,
        steps=task.n_steps,
        verifier=", ".join(mode for mode, there in modes.items() if there),
        image=config.environment.docker_image or base_image(task.path / "environment"),
        network=", ".join(sorted(mode.value for mode in agent)),
        cpus=config.environment.cpus,
        memory_mb=config.environment.memory_mb,
        storage_mb=config.environment.storage_mb,
        gpus=config.environment.gpus,
        agent_s=None if None in limits else sum(limit for limit in limits if limit is not None),
        verifier_s=sum(part.verifier.timeout_sec for part in parts),
        build_s=config.environment.build_timeout_sec,
        exposure=TaskRequirements(task.path, task.config).exposure("docker"),
        checked=list(checked.get(task.key, ())),
        pass_rate=rate.pass_rate if rate else None,
        attempts=rate.attempts if rate else None,
    )


def base_image(environment: Path) -> str:
    """Return `compose`, the final base image of the Dockerfile, or an empty string if there is neither."""
    file = environment / "Dockerfile"
    if compose_files(environment):
        return "compose"
    if not file.is_file():
        return ""
    try:
        return dockerfile.base_image(dockerfile.read_dockerfile(environment))
    except SandboxBuildError as error:
        raise UserError(str(error), where=str(file), do="correct the Dockerfile") from error


def read_tags(task: Path) -> list[str]:
    """Return the sorted tags of a task, with `category:...` and `difficulty:...` if the task.toml has them.

    The list is empty if the task.toml cannot be read; loading the task reports that error.
    """
    try:
        table = tomllib.loads((task / TASK_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    metadata = table.get("metadata")
    known = metadata if isinstance(metadata, dict) else {}
    listed = known.get("tags")
    tags = {str(tag) for tag in listed} if isinstance(listed, list) else set()
    tags |= {
        f"{key}:{known[key]}" for key in ("category", "difficulty") if isinstance(known.get(key), str) and known[key]
    }
    return sorted(tags)
