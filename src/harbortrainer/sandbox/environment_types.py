"""Environment types: the choice that `environment_type = "auto"` makes, and the fields of Harbor's EnvironmentConfig.

`auto` takes `local` if it supports everything that the task requires (`TaskRequirements`), else `docker`. The keyword
arguments then belong to the local sandbox. Invariant: the choice depends only on the task's files and this machine.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from harbortrainer.config.environment_table import environment_entry, unknown_type
from harbortrainer.errors import UserError
from harbortrainer.runs.label import run_labels
from harbortrainer.sandbox.images.image_choice import INSTALL, builder_problem
from harbortrainer.sandbox.task_requirements import TaskRequirements


@dataclass(frozen=True)
class EnvironmentChoice:
    """The environment type of one task."""

    kind: str
    """An environment type other than `auto`."""
    kwargs: dict[str, object] = field(default_factory=dict)
    """Keyword arguments for the environment's class."""
    reasons: list[str] = field(default_factory=list)
    """Requirements that the preferred type does not support, if it was not chosen."""


def choose_environment(task: Path, environment_type: str, kwargs: Mapping[str, object]) -> EnvironmentChoice:
    """Resolve `auto` for the task in a folder; keep any other type. Raises the errors of `TaskRequirements`."""
    candidates = environment_entry(environment_type).chosen_from
    if candidates is None:
        return EnvironmentChoice(environment_type, dict(kwargs))
    preferred, other = candidates
    if reasons := TaskRequirements(task).unsupported(preferred, kwargs):
        return EnvironmentChoice(other, reasons=reasons)
    return EnvironmentChoice(preferred, dict(kwargs))


def unsupported_remedy(environment_type: str, *, in_file: bool) -> str:
    """Return what to do about tasks that an environment type cannot run.

    Args:
        environment_type: The type, or `auto`.
        in_file: Whether a run file selects the type; else the option `--environment` does.
    """
    entry, exclude = environment_entry(environment_type), "exclude such tasks by name"
    if entry.chosen_from or not entry.needs_namespaces:
        return exclude
    image = f"{INSTALL} to build images, or " if builder_problem() else ""
    auto = "set environment_type = 'auto'" if in_file else "pass --environment auto"
    return f"{image}{auto}, which uses docker for the tasks that it can run, or {exclude}"


class EnvironmentFields(TypedDict, total=False):
    """Fields of `harbor.models.trial.config.EnvironmentConfig`: `kwargs`, and `import_path` or `type`."""

    import_path: str
    type: str
    kwargs: dict[str, object]


def environment_config(
    environment_type: str, kwargs: Mapping[str, object] | None = None, *, lifetime_s: float | None = None
) -> EnvironmentFields:
    """Return the fields of Harbor's `EnvironmentConfig` for an environment type.

    Args:
        environment_type: A name of `ENVIRONMENT_TYPES`, the name of one of Harbor's own types, or `module:Class`.
        kwargs: Passed to the environment's constructor.
        lifetime_s: Seconds after which a provider ends a sandbox that nothing stopped, unless `kwargs` says otherwise;
            None for the provider's own default.

    Raises:
        UserError: The name is none of these. The message lists the known names.
    """
    entry, given = environment_entry(environment_type), dict(kwargs or {})
    if entry.takes_labels:
        named, since = given.get("labels"), {"harbortrainer-since": str(int(time.time()))}
        given["labels"] = run_labels("-") | since | (named if isinstance(named, dict) else {})
    if entry.lifetime is not None and lifetime_s is not None:
        given.setdefault(entry.lifetime.argument, entry.lifetime.value(lifetime_s))
    if entry.import_path is not None:
        return {"import_path": entry.import_path, "kwargs": given}
    if wrong := unknown_type(environment_type):
        raise UserError(wrong[0], do=wrong[1])
    return {"type": environment_type, "kwargs": given}
