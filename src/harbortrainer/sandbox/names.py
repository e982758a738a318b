"""The name of an environment type, as a user writes it, to the fields of Harbor's EnvironmentConfig."""

import os
from typing import Any

from harbortrainer.errors import UserError

LOCAL = "local"
LOCAL_CLASS = "harbortrainer.sandbox.local:LocalEnvironment"
DOCKER = "docker"
DOCKER_CLASS = "harbortrainer.sandbox.docker:LabelledDocker"
TAKE_LABELS = ("modal", "daytona")
"""Providers whose sandboxes take labels in Harbor; the run's is `harbortrainer-run`."""

RUN_VARIABLE = "HARBORTRAINER_RUN"


def environment_config(environment_type: str, kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
    """The fields of `harbor.models.trial.config.EnvironmentConfig` for an environment type.

    Args:
        environment_type: `local`, the name of one of Harbor's own types, or `module:Class`.
        kwargs: Passed to the environment's constructor.

    Raises:
        UserError: The name is none of these; the message lists what there is.
    """
    given = dict(kwargs or {})
    if environment_type == LOCAL:
        return {"import_path": LOCAL_CLASS, "kwargs": given}
    if environment_type == DOCKER:
        return {"import_path": DOCKER_CLASS, "kwargs": given}
    if ":" in environment_type:
        return {"import_path": environment_type, "kwargs": given}
    if environment_type not in (known := _harbor_types()):
        names = ", ".join([LOCAL, *known])
        raise UserError(f"unknown environment type {environment_type!r}", do=f"use one of {names}, or module:Class")
    if environment_type in TAKE_LABELS and RUN_VARIABLE in os.environ:
        given["labels"] = {"harbortrainer-run": os.environ[RUN_VARIABLE]} | (given.get("labels") or {})
    return {"type": environment_type, "kwargs": given}


def _harbor_types() -> list[str]:
    from harbor.models.environment_type import EnvironmentType  # harbor is slow to import

    return [member.value for member in EnvironmentType]
