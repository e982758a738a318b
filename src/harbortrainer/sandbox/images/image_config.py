"""Conversion of an image's config, as Docker writes it, to `task_image.Image`.

No I/O. Ports, volumes and the command are ignored: Harbor gives every container its own command.
"""

import posixpath
import re
from collections.abc import Sequence
from typing import TypedDict

from harbortrainer.sandbox.dockerfile import substitute
from harbortrainer.sandbox.task_image import DEFAULT_PATH, Healthcheck, Image

_SECOND = 1e9
_INTERVAL_S, _TIMEOUT_S, _RETRIES = 30.0, 30.0, 3  # Docker's


class HealthcheckConfig(TypedDict, total=False):
    """`Healthcheck` of an image's config. Durations are nanoseconds."""

    Test: list[str]
    Interval: int
    Timeout: int
    StartPeriod: int
    Retries: int


class ImageConfig(TypedDict, total=False):
    """The part of an image's config that a sandbox uses."""

    Env: list[str] | None
    User: str
    WorkingDir: str
    Entrypoint: list[str] | None
    Shell: list[str] | None
    Healthcheck: HealthcheckConfig | None


class HistoryStep(TypedDict, total=False):
    """Instruction in an image's history."""

    created_by: str
    empty_layer: bool


def image_from_config(config: ImageConfig, history: Sequence[HistoryStep]) -> Image:
    """Return the image of a config, without its layers."""
    shell = config.get("Shell") or ["/bin/sh", "-c"]
    env = {"PATH": DEFAULT_PATH} | parse_env(config.get("Env") or [])
    return Image(
        env=env,
        workdir=config.get("WorkingDir") or "/",
        folders=_missing_workdirs(history, env),
        user=config.get("User") or None,
        shell=shell,
        entrypoint=config.get("Entrypoint") or [],
        healthcheck=_healthcheck(config.get("Healthcheck") or {}, shell),
    )


def _missing_workdirs(history: Sequence[HistoryStep], env: dict[str, str]) -> list[str]:
    """Return the folders of WORKDIR instructions that wrote no layer. Docker's builder would create them."""
    found: list[str] = []
    at: str | None = "/"
    for step in history:
        _, is_one, written = step.get("created_by", "").partition("WORKDIR ")
        if is_one:
            folder = _expand(written.strip(), env)
            is_unknown = folder is None or (at is None and not folder.startswith("/"))
            at = None if is_unknown else posixpath.join(at or "/", folder or "")
            found += [at] if at is not None and step.get("empty_layer") else []
    return found


_VARIABLE = re.compile(r"(?<!\\)\$(?:\{(.*?)\}|(\w+))")


def _expand(text: str, env: dict[str, str]) -> str | None:
    """Replace the variables that buildah's history leaves; None if one is an ARG or has a default."""
    names = (found[1] or found[2] for found in _VARIABLE.finditer(text))
    return substitute(text, env) if all(name in env for name in names) else None


def parse_env(pairs: Sequence[str]) -> dict[str, str]:
    """Convert `["NAME=value", ...]` to a mapping."""
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def _healthcheck(config: HealthcheckConfig, shell: list[str]) -> Healthcheck | None:
    """Return the check with the time after which Docker would report the container as unhealthy."""
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
