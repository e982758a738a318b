"""Runs one trial of Harbor's and says how it ended.

Invariant: whatever happens inside the trial is data, an `Outcome` of the returned record. Exceptions are only
`UserError` (the task or the environment cannot be), `asyncio.CancelledError` (after the sandbox is torn down) and defects.
"""

from collections.abc import Awaitable, Callable

from harbortrainer.trials.record import TrialRecord
from harbortrainer.trials.spec import TrialSpec

type Event = str
"""start, environment-start, agent-start, agent-end, verification-start, end, cancel: Harbor's own names."""

type OnEvent = Callable[[Event], Awaitable[None]]


async def run_trial(
    spec: TrialSpec,
    *,
    on_event: OnEvent | None = None,
    stop: Callable[[], str | None] | None = None,
) -> TrialRecord:
    """Run one trial from the start of its sandbox to its teardown.

    Args:
        spec: What to run.
        on_event: Awaited at each event, in order and inside the trial: what it does happens before the trial goes on.
            A multi-step trial repeats agent-start, agent-end and verification-start for each step.
        stop: Says why the interception endpoint stopped the rollout (`max_turns`, `context_length`, ...), None while it
            has not. An agent, ours or not, that fails after a stop ended cleanly and is graded.

    Raises:
        UserError: The task cannot be loaded, or the environment type is unknown.
        asyncio.CancelledError: The caller cancelled; the sandbox is gone by then.
    """
    raise NotImplementedError
