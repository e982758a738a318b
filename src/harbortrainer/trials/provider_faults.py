"""Faults of sandbox providers: a failed request is a sandbox error, and a failed stop never changes a trial.

- Requests (commands, transfers, checks) raise whatever the provider's client raises: httpx's `ReadTimeout`, which a
  model's client raises too, or names that only one provider has. `SandboxRequestError` replaces them, with the
  provider's words, so that the outcome is a `sandbox_error` on any provider.
  A command that ran into its own time limit is no fault; its exception stays (`exceeded_limit`).
- `stop` is called when the trial is graded. A stop that fails, or hangs for `STOP_S`, is logged and retried in the
  background. Until it succeeds, a file in `.unstopped` beside the trials names the sandbox.

Invariant: the wrapped `stop` raises nothing but cancellation, and returns within `STOP_S` seconds.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.errors import clauses
from harbortrainer.runs.durable import write_whole
from harbortrainer.runs.label import RUN_VARIABLE
from harbortrainer.sandbox.errors_and_changes import SandboxError

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment

STOP_S = 60.0
"""Seconds that one call of `stop` may take."""
RETRY_PAUSES_S = (5.0, 30.0, 120.0, 600.0)
"""Seconds before each further stop of a sandbox that did not stop."""
UNSTOPPED = ".unstopped"
"""Folder beside the trials with one file for each sandbox that did not stop."""
_TRANSFERS = ("upload_file", "upload_dir", "download_file", "download_dir", "download_dir_filtered")
_REQUESTS = ("exec", *_TRANSFERS, "is_dir", "is_file", "empty_dirs", "ensure_dirs")
_PATH_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Answers to a transfer of a path that is not there or is of another kind; the caller handles them."""
_TIMEOUT = re.compile("time(d )?out", re.IGNORECASE)
_RETRY_AFTER_S, _LONGEST_RETRY_AFTER_S = 1.0, 120.0
"""Seconds to wait after a refusal without Retry-After, and most with it."""
_TOO_MANY = re.compile(r"\b429\b|too many requests|rate.?limit", re.IGNORECASE)
_DENIED = re.compile(
    r"unauthori[sz]ed|unauthenticated|forbidden|permission_?denied|payment.required"
    r"|auth(entication|orization)?.?(error|exception|failed)",
    re.IGNORECASE,
)
_BUILD = re.compile("build|dockerfile", re.IGNORECASE)
_log = logging.getLogger(__name__)
_retries: set[asyncio.Task[None]] = set()

type _Request = Callable[..., Awaitable[object]]


class SandboxRequestError(SandboxError):
    """A request to the sandbox failed at the provider; the message has the provider's own type and words."""


def guard_environment(environment: "BaseEnvironment") -> None:
    """Wrap the requests and the stop of one sandbox."""
    for name in _REQUESTS:
        if (request := getattr(environment, name, None)) is not None:
            setattr(environment, name, _with_provider_blamed(name, request))
    setattr(environment, "stop", _StopGuard(environment, environment.stop).stop)  # noqa: B010 - this object only


def _with_provider_blamed(name: str, request: _Request) -> _Request:
    async def blamed(*args: object, **named: object) -> object:
        began = time.monotonic()
        try:
            return await request(*args, **named)
        except SandboxError:
            raise
        except Exception as error:
            own_limit = exceeded_limit(error, named.get("timeout_sec"), time.monotonic() - began)
            if own_limit or (name in _TRANSFERS and isinstance(error, _PATH_ERRORS)):
                raise
            words = " ".join(str(error).split())
            kind = type(error).__name__
            raise SandboxRequestError(
                f"{name} failed: {kind}: {words}" if words else f"{name} failed: {kind}"
            ) from error

    return blamed


def exceeded_limit(error: BaseException, limit_s: object, elapsed_s: float) -> bool:
    """Return whether a command failed at its own time limit, and not because its provider failed.

    Providers share no exception for it: `e2b.TimeoutException`, `modal.exception.ExecTimeoutError`, a RuntimeError
    "Command timed out after 10 seconds". They share the word, in the class or the message of the error or of a cause.

    Args:
        error: What the request raised.
        limit_s: The limit that the caller set; None or 0 for no limit.
        elapsed_s: The time from the request to the error.
    """
    if isinstance(error, SandboxError) or not isinstance(limit_s, int | float) or not 0 < limit_s <= elapsed_s:
        return False
    return any(_TIMEOUT.search(f"{type(cause).__mro__} {cause}") for cause in causes(error))


def causes(error: BaseException) -> list[BaseException]:
    """Return an error and what caused it, the error first."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__
    return found


def retry_after_s(error: BaseException) -> float | None:
    """Return the seconds that a provider asked to wait when it refused a start (429); None for any other error.

    Clients of providers have the status and the headers in different places; some have only the words.
    """
    for cause in causes(error):
        response = getattr(cause, "response", None)
        if 429 in _statuses(cause) or _TOO_MANY.search(f"{type(cause).__name__} {cause}"):
            headers = getattr(response, "headers", None) or getattr(cause, "headers", None) or {}
            with contextlib.suppress(AttributeError, TypeError, ValueError):
                asked = {str(name).lower(): value for name, value in headers.items()}.get("retry-after")
                return min(max(0.0, float(asked)), _LONGEST_RETRY_AFTER_S)  # ty: ignore[invalid-argument-type] - suppressed
            return _RETRY_AFTER_S
    return None


def is_denied(error: BaseException) -> bool:
    """Return whether a provider denied access: a wrong key, a missing permission, or an unpaid account.

    The message of a failed build holds lines of its log, where "403 Forbidden" is the answer of a package server.
    """
    chain = causes(error)
    if any(_statuses(cause) & {401, 402, 403} or _DENIED.search(type(cause).__name__) for cause in chain):
        return True
    words = " ".join(f"{type(cause).__name__}: {cause}" for cause in chain)
    return _DENIED.search(words) is not None and not _BUILD.search(words)


def _statuses(error: BaseException) -> set[int]:
    holders, names = (error, getattr(error, "response", None)), ("status_code", "status", "code")
    found = [getattr(holder, name, None) for holder in holders for name in names]
    return {status for status in found if isinstance(status, int)}


class _StopGuard:
    """The bounded stop of one sandbox.

    Args:
        environment: The sandbox.
        stop: Its own `stop`.
    """

    def __init__(self, environment: "BaseEnvironment", stop: Callable[[bool], Awaitable[None]]) -> None:
        self._environment, self._stop = environment, stop

    async def stop(self, delete: bool) -> None:
        """Stop the sandbox; if that fails, warn, and retry in the background."""
        fault = await self._fault_of_stop(delete)
        if not fault:
            return
        name = self._environment.session_id
        # A trial that is played again has the same name.
        entry = self._environment.trial_paths.trial_dir.parent / UNSTOPPED / f"{name}-{secrets.token_hex(4)}.json"
        try:
            await asyncio.to_thread(self._write_entry, entry, fault)
            do = f"retrying in the background, see {entry}"
        except OSError as error:  # such as a full disk
            do = f"retrying in the background, not listed: {error}"
        _log.warning("sandbox %s was not stopped: %s", name, clauses(fault, do))
        retry = asyncio.create_task(self._retry(delete, entry))
        _retries.add(retry)
        retry.add_done_callback(_retries.discard)

    async def _fault_of_stop(self, delete: bool) -> str:
        """Call `stop` once. Returns why it failed, "" if it did not."""
        stopping = asyncio.ensure_future(self._stop(delete))
        try:
            done, _ = await asyncio.wait({stopping}, timeout=STOP_S)
        except asyncio.CancelledError:
            stopping.cancel()
            raise
        if not done:
            stopping.cancel()  # not awaited: a client may ignore it
            return f"no answer within {STOP_S:.0f} s"
        if stopping.cancelled():
            return "cancelled by the provider's client"
        error = stopping.exception()
        return "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())[:500]

    async def _retry(self, delete: bool, entry: Path) -> None:
        for pause_s in RETRY_PAUSES_S:
            await asyncio.sleep(pause_s)
            if not await self._fault_of_stop(delete):
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(entry.unlink)
                return
        _log.warning("sandbox %s was not stopped by %d calls", self._environment.session_id, len(RETRY_PAUSES_S) + 1)

    def _write_entry(self, entry: Path, fault: str) -> None:
        entry.parent.mkdir(parents=True, exist_ok=True)
        kind = self._environment.type()  # a member of an Enum, or its value
        facts = {
            "sandbox": self._environment.session_id,
            "environment_type": getattr(kind, "value", kind),
            "run": os.environ.get(RUN_VARIABLE, ""),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "fault": fault,
        }
        write_whole(entry, json.dumps(facts) + "\n")
