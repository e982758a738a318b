"""The name of an environment type, as a user writes it, to the fields of Harbor's EnvironmentConfig."""

import os
from collections.abc import Mapping
from typing import TypedDict

from harbortrainer.config.plugin import AUTO
from harbortrainer.errors import UserError
from harbortrainer.runs.label import RUN_VARIABLE

OURS = {
    "local": "harbortrainer.sandbox.local:LocalEnvironment",
    "docker": "harbortrainer.sandbox.labelled_docker:LabelledDocker",
}
OURS[AUTO] = OURS["local"]  # of many tasks; a trial has chosen for its own
TAKE_LABELS = ("modal", "daytona")
"""Providers whose sandboxes take labels in Harbor; the run's is `harbortrainer-run`."""


class EnvironmentFields(TypedDict, total=False):
    """Fields of `harbor.models.trial.config.EnvironmentConfig`: `import_path` or `type`, and `kwargs`."""

    import_path: str
    type: str
    kwargs: dict[str, object]


def environment_config(environment_type: str, kwargs: Mapping[str, object] | None = None) -> EnvironmentFields:
    """The fields of Harbor's `EnvironmentConfig` for an environment type.

    Args:
        environment_type: `local`, `auto`, the name of one of Harbor's own types, or `module:Class`.
        kwargs: Passed to the environment's constructor.

    Raises:
        UserError: The name is none of these; the message lists what there is.
    """
    given = dict(kwargs or {})
    if environment_type in OURS or ":" in environment_type:
        return {"import_path": OURS.get(environment_type, environment_type), "kwargs": given}
    if environment_type not in (known := _harbor_types()):
        names = ", ".join([AUTO, "local", *known])
        raise UserError(f"unknown environment type {environment_type!r}", do=f"use one of {names}, or module:Class")
    if environment_type in TAKE_LABELS and RUN_VARIABLE in os.environ:
        named = given.get("labels")
        given["labels"] = {"harbortrainer-run": os.environ[RUN_VARIABLE]} | (named if isinstance(named, dict) else {})
    return {"type": environment_type, "kwargs": given}


def _harbor_types() -> list[str]:
    from harbor.models.environment_type import EnvironmentType  # harbor is slow to import

    return [member.value for member in EnvironmentType]
