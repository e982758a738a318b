"""Where a task is played when nobody says: `environment_type = "auto"`.

`local` where that honours all that the task asks for (`TaskDemands`), `docker` for the others. Keyword arguments of the
environment are the local sandbox's then. Invariant: the choice depends on the task's files and on this machine alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harbortrainer.config.plugin import AUTO
from harbortrainer.sandbox.task_demands import TaskDemands


@dataclass(frozen=True)
class EnvironmentChoice:
    """A kind of sandbox for one task."""

    kind: str
    """Never `auto`."""
    kwargs: dict[str, object] = field(default_factory=dict)
    """Of its class."""
    why: list[str] = field(default_factory=list)
    """What `local` cannot give the task, where that was asked and is not the choice."""


def chosen(task: Path, environment_type: str, kwargs: Mapping[str, object]) -> EnvironmentChoice:
    """The kind of sandbox for the task in a folder; what is said by name stays. Raises as `TaskDemands`."""
    if environment_type != AUTO:
        return EnvironmentChoice(environment_type, dict(kwargs))
    if why := TaskDemands(task).beyond("local", kwargs):
        return EnvironmentChoice("docker", why=why)
    return EnvironmentChoice("local", dict(kwargs))
