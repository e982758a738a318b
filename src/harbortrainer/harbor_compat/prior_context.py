"""A task's `trajectory.json`: the prior context that Harbor loads into the agent's session, since 0.25.

Earlier releases ignore the file. Harbor's `oracle` and `nop` ignore it too.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.config.agent_table import SHORT_NAMES, WITHOUT_MODEL, is_class
from harbortrainer.harbor_compat import keep_litellm_offline

if TYPE_CHECKING:
    from harbor.agents.base import BaseAgent

TRAJECTORY = "trajectory.json"


def trajectory_problem(file: Path, agent: str) -> str:
    """Return why Harbor ends each trial of a task with this trajectory at once; empty if it does not.

    Args:
        file: The task's trajectory, beside its first instruction; it need not exist.
        agent: Harbor's name, a short name of ours, or `module:Class`.
    """
    if not file.is_file() or not _gets_trajectory(agent):
        return ""
    if not _loads_trajectory(agent):
        return f"{TRAJECTORY} is prior context, which the agent cannot load"
    from harbor.models.trajectories import Trajectory

    try:
        Trajectory.model_validate_json(file.read_text())
    except ValueError:
        return f"{TRAJECTORY} is not a trajectory in Harbor's format (ATIF)"
    return ""


def ignore_trajectories(agent: "type[BaseAgent]") -> None:
    """Let an agent's class play tasks with a trajectory, which it ignores."""
    if (known := getattr(agent, "capabilities", None)) is not None:
        setattr(agent, "capabilities", known.model_copy(update={"load_atif_trajectory": True}))  # noqa: B010 - since 0.25
        setattr(agent, "load", lambda self, *args, **named: self.run(*args, **named))  # noqa: B010 - since 0.25


def _gets_trajectory(agent: str) -> bool:
    """Whether Harbor gives the trajectory of a task to the agent."""
    keep_litellm_offline()
    from harbor.models.task.paths import TaskPaths

    return hasattr(TaskPaths, "trajectory_path") and agent not in WITHOUT_MODEL


@cache
def _loads_trajectory(agent: str) -> bool:
    """Whether the agent's class can load a trajectory; True for an agent that Harbor cannot make, which it reports."""
    from harbor.agents.factory import AgentFactory
    from harbor.models.trial.config import AgentConfig

    agent = SHORT_NAMES.get(agent, agent)
    config = AgentConfig(import_path=agent) if is_class(agent) else AgentConfig(name=agent)
    try:
        found = AgentFactory.get_agent_class_from_config(config)  # ty: ignore[missing-attribute] - since 0.25
    except Exception:  # noqa: BLE001 - a user's class too
        return True
    return found.capabilities.load_atif_trajectory
