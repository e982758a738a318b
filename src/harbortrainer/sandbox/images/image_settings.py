"""What an image says besides its files, from its config as Docker writes it, into `task_image.Image`.

No I/O. What it says about ports, volumes and its command means nothing here: Harbor gives every container a command of
its own.
"""

import posixpath
from collections.abc import Sequence
from typing import TypedDict

from harbortrainer.sandbox.task_image import DEFAULT_PATH, Healthcheck, Image

_SECOND = 1e9
_INTERVAL_S, _TIMEOUT_S, _RETRIES = 30.0, 30.0, 3  # Docker's


class HealthcheckConfig(TypedDict, total=False):
    """`Healthcheck` of an image's config: its test, and nanoseconds."""

    Test: list[str]
    Interval: int
    Timeout: int
    StartPeriod: int
    Retries: int


class ImageConfig(TypedDict, total=False):
    """The part of an image's config that means something in a sandbox."""

    Env: list[str] | None
    User: str
    WorkingDir: str
    Entrypoint: list[str] | None
    Shell: list[str] | None
    Healthcheck: HealthcheckConfig | None


class PastStep(TypedDict, total=False):
    """An instruction in an image's history."""

    created_by: str
    empty_layer: bool


def settings_of(config: ImageConfig, history: Sequence[PastStep] = ()) -> Image:
    """The image without its files."""
    shell = config.get("Shell") or ["/bin/sh", "-c"]
    return Image(
        env={"PATH": DEFAULT_PATH} | variables(config.get("Env") or []),
        workdir=config.get("WorkingDir") or "/",
        folders=_left_out(history),
        user=config.get("User", "").partition(":")[0] or None,
        shell=shell,
        entrypoint=config.get("Entrypoint") or [],
        healthcheck=_healthcheck(config.get("Healthcheck") or {}, shell),
    )


def _left_out(history: Sequence[PastStep]) -> list[str]:
    """The folders of instructions `WORKDIR` that wrote no layer: Docker's own builder makes each."""
    found, at = [], "/"
    for step in history:
        _, is_one, folder = step.get("created_by", "").partition("WORKDIR ")
        if is_one:
            at = posixpath.join(at, folder.strip())
            found += [at] if step.get("empty_layer") else []
    return found


def variables(pairs: Sequence[str]) -> dict[str, str]:
    """`["NAME=value", ...]` as a mapping."""
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def _healthcheck(config: HealthcheckConfig, shell: list[str]) -> Healthcheck | None:
    """The check with the seconds after which Docker would have called the container unhealthy."""
    kind, *test = config.get("Test") or ["NONE"]
    if kind == "NONE":
        return None
    interval = config.get("Interval", 0) / _SECOND or _INTERVAL_S
    timeout = config.get("Timeout", 0) / _SECOND or _TIMEOUT_S
    retries = config.get("Retries", 0) or _RETRIES
    return Healthcheck(
        argv=[*shell, *test] if kind == "CMD-SHELL" else test,
        timeout_s=timeout,
        within_s=config.get("StartPeriod", 0) / _SECOND + retries * (interval + timeout),
    )
