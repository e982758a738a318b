"""Time limits of the requests that Harbor sends to a sandbox without one: file transfers, checks and clean-up.

Commands of the agent and the verifier have their phases' timeouts and get no further limit here.

Invariant: a sandbox that does not answer delays its trial by one limit, and a cancelled trial by a few seconds.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harbortrainer.sandbox.errors_and_changes import SandboxError

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment

REQUEST_S = 600.0
AFTER_CANCEL_S = 4.0
"""Seconds that all requests of a cancelled trial may take together."""
_AFTER_TIMEOUT_S = 5.0
"""Seconds of each request after another one has timed out."""
_REQUESTS = (
    *("upload_file", "upload_dir", "download_file", "download_dir", "download_dir_filtered"),
    *("is_dir", "is_file", "empty_dirs", "ensure_dirs", "prepare_logs_for_host"),
    *("changes", "raise_limits", "restore_limits", "clear_folders"),
)
_BEST_EFFORT = ("prepare_logs_for_host",)
"""Requests that never raise: Harbor sends them before it removes the sandbox, and an error would leave it running."""
_log = logging.getLogger(__name__)

type _Request = Callable[..., Awaitable[object]]


@dataclass
class _Deadlines:
    """Limits of one trial's requests."""

    seconds: float = REQUEST_S
    end: float | None = None
    """Monotonic time at which the requests of a cancelled trial end."""

    def remaining(self) -> float:
        task = asyncio.current_task()
        if self.end is None and task is not None and task.cancelling():
            self.end = time.monotonic() + AFTER_CANCEL_S
        return self.seconds if self.end is None else min(self.seconds, self.end - time.monotonic())

    def limit(self, name: str, request: _Request) -> _Request:
        async def limited(*args: object, **named: object) -> object:
            seconds = self.remaining()
            try:
                async with asyncio.timeout(seconds) as clock:
                    return await request(*args, **named)
            except TimeoutError as error:
                if not clock.expired():
                    raise
                self.seconds = _AFTER_TIMEOUT_S
                text = f"the sandbox did not answer {name} within {max(0.0, seconds):.0f} s"
                if name not in _BEST_EFFORT:
                    raise SandboxError(text) from error
                _log.warning(text)
                return None

        return limited


def set_deadlines(environment: "BaseEnvironment") -> None:
    """Limit the time of the requests to this sandbox. Beyond its limit, all but clean-up raises SandboxError."""
    deadlines = _Deadlines()
    for name in _REQUESTS:
        if (request := getattr(environment, name, None)) is not None:
            setattr(environment, name, deadlines.limit(name, request))
