"""Keeps the secrets of whoever starts the run out of sandboxes.

Some of Harbor's agents look into this process's environment for the keys of services, and hand what they find to the
program that they start, which a model's commands can read. What the run or the task asks for by name goes in.
"""

import functools
import logging
import os
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harbor.agents.base import BaseAgent
    from harbor.environments.base import BaseEnvironment, ExecResult

type _Work = Callable[..., Awaitable[None]]
type _Exec = Callable[..., Awaitable[ExecResult]]

logger = logging.getLogger(__name__)

_SECRET = re.compile("KEY|SECRET|TOKEN|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_LONG = 8
"""What is shorter can be there by chance under another name."""
_LONG_INSIDE = 12
"""What is shorter can stand by chance in a longer value, as a word does in a sentence."""


def keep_out(agent: "BaseAgent", environment: "BaseEnvironment", given: Collection[str]) -> None:
    """While the agent is set up and at work, its commands are not told a secret of this process's environment.

    Args:
        agent: Of a trial.
        environment: Where it works.
        given: Values that it is told on purpose.
    """
    for name in ("setup", "run", "resume"):
        setattr(agent, name, _guarded(getattr(agent, name), environment, given))


def _guarded(work: _Work, environment: "BaseEnvironment", given: Collection[str]) -> _Work:
    async def guarded(*args: object, **kwargs: object) -> None:
        if "exec" in vars(environment):  # an agent's `resume` calls its `run`
            return await work(*args, **kwargs)
        setattr(environment, "exec", _without_secrets(environment.exec, given))  # noqa: B010 - of this object alone
        try:
            await work(*args, **kwargs)
        finally:
            delattr(environment, "exec")  # its class's again

    return guarded


def _without_secrets(execute: _Exec, given: Collection[str]) -> _Exec:
    async def without_secrets(
        command: str, cwd: str | None = None, env: Mapping[str, str] | None = None, *rest: object, **named: object
    ) -> "ExecResult":
        return await execute(command, cwd, without(env, given) if env else None, *rest, **named)

    return without_secrets


def without(env: Mapping[str, str], given: Collection[str]) -> dict[str, str]:
    """The variables that tell no secret of this process's, under whatever name.

    Args:
        env: Variables of a command.
        given: Values that may be there.
    """
    own = {name: value for name, value in os.environ.items() if _SECRET.search(name) and not _is_told(value, given)}
    left = {
        name: value
        for name, value in env.items()
        if not (value and own.get(name) == value) and not any(_tells(value, secret) for secret in own.values())
    }
    if dropped := sorted(env.keys() - left.keys()):
        _tell(", ".join(dropped))
    return left


def _is_told(secret: str, given: Collection[str]) -> bool:
    """Whether what may be there tells it anyway."""
    return secret in given or any(_tells(text, secret) for text in given)


def _tells(value: str, secret: str) -> bool:
    """Whether a secret is a value or stands in it, as in JSON or in an address, and not by chance."""
    return (len(secret) >= _LONG and secret == value) or (len(secret) >= _LONG_INSIDE and secret in value)


@functools.cache
def _tell(names: str) -> None:
    """Once, and not in each trial."""
    logger.warning(
        "the agent is not told %s of this process's environment: what a sandbox may know is asked for by the "
        "harness's env",
        names,
    )
