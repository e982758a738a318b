"""Ends any agent cleanly once the interception endpoint has stopped the rollout.

Harbor skips the verifier when an agent raises, and most agents raise, or go on trying, when their model calls are
refused. The state they left is the policy's, and is to be graded.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from harbortrainer.trials.outcome import ending_of


class AgentStalledError(RuntimeError):
    """A timeout inside the agent. Harbor would take it for the agent's time being up, which trains."""


type Stop = Callable[[], str | None]

GRACE_S = 3.0
"""How long an agent may go on by itself after the stop."""

_POLL_S = 0.5


def end_cleanly(agent: object, stop: Stop, *, grace_s: float = GRACE_S) -> None:
    """Wrap `run` and `resume` of one of Harbor's agents: after a stop they return, whatever the agent makes of it."""
    for name in ("run", "resume"):
        setattr(agent, name, _guarded(getattr(agent, name), stop, grace_s))


def _guarded(run: Callable[..., Awaitable[None]], stop: Stop, grace_s: float) -> Callable[..., Awaitable[None]]:
    async def guarded(*args: Any, **kwargs: Any) -> None:
        task = asyncio.ensure_future(run(*args, **kwargs))
        try:
            await _until_done_or_stopped(task, stop, grace_s)
        finally:
            await _cancel(task)
        error = task.exception() if not task.cancelled() else None
        if error is None or ending_of(stop()) is not None:
            return
        if isinstance(error, TimeoutError):
            raise AgentStalledError(str(error) or "something that the agent waited for timed out") from error
        raise error

    return guarded


async def _until_done_or_stopped(task: asyncio.Future[None], stop: Stop, grace_s: float) -> None:
    while not task.done() and ending_of(stop()) is None:
        await asyncio.wait({task}, timeout=_POLL_S)
    if not task.done():
        await asyncio.wait({task}, timeout=grace_s)


async def _cancel(task: asyncio.Future[None]) -> None:
    """Cancel and wait; what it raises then is read by the caller."""
    while not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
