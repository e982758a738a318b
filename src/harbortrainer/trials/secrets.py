"""Secrets: the model endpoint's key for the agent, and the user's own keys, which must stay out of sandboxes.

- The endpoint's key is passed in a context variable. Harbor writes an agent's keyword arguments to config.json,
  lock.json, result.json and trajectory.json, and its environment variables into the sandbox.
- Some Harbor agents look for API keys in this process's environment and pass them to the program they start, where the
  model's commands can read them. `keep_secrets_out` removes them. Values that the run or the task names stay.
"""

import contextlib
import functools
import logging
import mmap
import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from harbortrainer.config.secret_names import is_secret

if TYPE_CHECKING:
    from harbor.agents.base import BaseAgent
    from harbor.environments.base import BaseEnvironment, ExecResult

_API_KEY: ContextVar[str | None] = ContextVar("harbortrainer_api_key", default=None)

NO_KEY = "EMPTY"
MIN_REDACTED_CHARS = 8
"""A shorter value may equal a secret by chance, and be a part of numbers and words."""


@contextmanager
def provide_api_key(key: str) -> Generator[None]:
    """Provide `key` to the agent that is made inside this block."""
    token = _API_KEY.set(key)
    try:
        yield
    finally:
        _API_KEY.reset(token)


def api_key() -> str:
    """Return the provided key, else the process's OPENAI_API_KEY, else a placeholder."""
    return _API_KEY.get() or os.environ.get("OPENAI_API_KEY", NO_KEY)


def redact_text(text: str, secret: str) -> str:
    """Return the text without the secret; a secret shorter than `MIN_REDACTED_CHARS` stays."""
    return text.replace(secret, "[REDACTED]") if len(secret) >= MIN_REDACTED_CHARS else text


def redact_texts(text: str, hidden: Iterable[str]) -> str:
    """Return the text without several secrets, as `redact_text`."""
    for secret in sorted(hidden, key=len, reverse=True):
        text = redact_text(text, secret)
    return text


def redact(folder: Path, secret: str) -> None:
    """Redact `secret` in every text file below `folder`, as `redact_text`. Blocks: run it in a thread.

    A file that the agent made unreadable stays as it is.
    """
    if len(secret) < MIN_REDACTED_CHARS:
        return
    for path in list(folder.rglob("*")):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and path.stat().st_size:
                _redact_file(path, secret.encode())


def _redact_file(path: Path, needle: bytes) -> None:
    """Redact a file through a mapping: it may be larger than the memory."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = content.find(needle)
        if at < 0 or b"\0" in content[:8192]:
            return
        draft, begin = path.with_name(f".{token_hex(8)}.redacted"), 0
        with draft.open("xb") as redacted, memoryview(content) as view:
            while at >= 0:
                redacted.write(view[begin:at])
                redacted.write(b"[REDACTED]")
                begin = at + len(needle)
                at = content.find(needle, begin)
            redacted.write(view[begin:])
    shutil.copymode(path, draft)
    draft.replace(path)


type _Work = Callable[..., Awaitable[None]]
type _Exec = Callable[..., Awaitable[ExecResult]]

logger = logging.getLogger(__name__)

_MIN_SUBSTRING_CHARS = 12
"""A shorter secret may occur in a longer value by chance."""


def keep_secrets_out(agent: "BaseAgent", environment: "BaseEnvironment", given: Collection[str]) -> None:
    """Remove this process's secrets from the variables of the agent's commands, during its setup and its runs.

    Args:
        agent: The agent of a trial.
        environment: The agent's environment.
        given: Values that the agent may have.
    """
    for name in ("setup", "run", "resume"):
        setattr(agent, name, _guarded(getattr(agent, name), environment, given))


def _guarded(work: _Work, environment: "BaseEnvironment", given: Collection[str]) -> _Work:
    async def guarded(*args: object, **kwargs: object) -> None:
        execute, wrapped = environment.exec, vars(environment).get("exec")
        if isinstance(execute, _ExecWithoutSecrets):  # an agent's `resume` calls its `run`
            return await work(*args, **kwargs)
        setattr(environment, "exec", _ExecWithoutSecrets(execute, given))  # noqa: B010 - this object only
        try:
            await work(*args, **kwargs)
        finally:
            if wrapped is None:
                delattr(environment, "exec")  # restores the method of its class
            else:
                setattr(environment, "exec", wrapped)  # noqa: B010

    return guarded


class _ExecWithoutSecrets:
    """An environment's `exec` that gets no secret as a variable."""

    def __init__(self, execute: _Exec, given: Collection[str]) -> None:
        self._execute, self._given = execute, given

    async def __call__(
        self, command: str, cwd: str | None = None, env: Mapping[str, str] | None = None, *rest: object, **named: object
    ) -> "ExecResult":
        return await self._execute(command, cwd, remove_secrets(env, self._given) if env else None, *rest, **named)


def remove_secrets(env: Mapping[str, str], given: Collection[str]) -> dict[str, str]:
    """Return the variables without those that contain a secret of this process's environment, whatever their name.

    Args:
        env: Variables of a command.
        given: Values that may stay.
    """
    secrets = {
        name: value for name, value in os.environ.items() if is_secret(name, value) and not _is_given(value, given)
    }
    kept = {
        name: value
        for name, value in env.items()
        if not (value and secrets.get(name) == value)
        and not any(_contains(value, secret) for secret in secrets.values())
    }
    if removed := sorted(env.keys() - kept.keys()):
        _warn_once(", ".join(removed))
    return kept


def _is_given(secret: str, given: Collection[str]) -> bool:
    """Whether a given value is or contains this secret."""
    return secret in given or any(_contains(text, secret) for text in given)


def _contains(value: str, secret: str) -> bool:
    """Whether a value is or contains the secret, as JSON or a URL may, and not by chance."""
    is_equal = len(secret) >= MIN_REDACTED_CHARS and secret == value
    return is_equal or (len(secret) >= _MIN_SUBSTRING_CHARS and secret in value)


@functools.cache
def _warn_once(names: str) -> None:
    """Warn once per process, not in each trial."""
    logger.warning(
        "%s of this process's environment is not passed to the agent's sandbox; to pass a variable, name it in env of "
        "the harness's table",
        names,
    )
