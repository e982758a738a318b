"""How a trial ended, who is to blame, and what follows from it. One table; everything asks here.

Invariant: a failure is never a reward of 0. An outcome that trains comes with finite rewards of the
verifier's; an outcome without them does not train. Pure: no I/O, no Harbor. `docs/outcomes.md` holds the table.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from harbortrainer.trials import exceptions as names

type Blame = Literal["policy", "harness", "engine", "infrastructure", "task", "run"]
type Phase = Literal["environment_setup", "agent_setup", "agent", "verification"]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table.

    Args:
        blame: Who is to blame.
        trains: Whether the verifier's reward goes to the learner.
        flagged: Whether the trial was cut short, although it trains.
        retries: How often the trial is tried again before it counts as lost.
        backoff: Whether a retry waits first.
    """

    blame: Blame
    trains: bool = False
    flagged: bool = False
    retries: int = 0
    backoff: bool = False


class Outcome(StrEnum):
    """How a trial ended. Its properties are its row of the table."""

    completed = "completed"
    agent_timeout = "agent_timeout"
    turn_limit = "turn_limit"
    context_limit = "context_limit"
    output_limit = "output_limit"
    agent_error = "agent_error"
    model_error = "model_error"
    sandbox_error = "sandbox_error"
    verifier_error = "verifier_error"
    cancelled = "cancelled"

    @property
    def blame(self) -> Blame:
        """Who is to blame."""
        return TABLE[self].blame

    @property
    def trains(self) -> bool:
        """Whether the verifier's reward goes to the learner."""
        return TABLE[self].trains

    @property
    def flagged(self) -> bool:
        """Whether the trial was cut short, although it trains."""
        return TABLE[self].flagged

    @property
    def retries(self) -> int:
        """How often the trial is tried again before it counts as lost."""
        return TABLE[self].retries

    @property
    def retried(self) -> bool:
        """Whether the trial is tried again at all."""
        return TABLE[self].retries > 0

    @property
    def backoff(self) -> bool:
        """Whether a retry waits first."""
        return TABLE[self].backoff


TABLE: dict[Outcome, Row] = {
    Outcome.completed: Row("policy", trains=True),
    Outcome.agent_timeout: Row("policy", trains=True, flagged=True),
    Outcome.turn_limit: Row("policy", trains=True, flagged=True),
    Outcome.context_limit: Row("policy", trains=True, flagged=True),
    Outcome.output_limit: Row("policy", trains=True, flagged=True),
    Outcome.agent_error: Row("harness", retries=2),
    Outcome.model_error: Row("engine", retries=2),
    Outcome.sandbox_error: Row("infrastructure", retries=3, backoff=True),
    Outcome.verifier_error: Row("task", retries=1),
    Outcome.cancelled: Row("run"),
}

# The interception endpoint's word for why it refuses further calls, old and new spelling.
STOPS: dict[str, Outcome] = {
    "max_turns": Outcome.turn_limit,
    "context_length": Outcome.context_limit,
    "max_input_tokens": Outcome.context_limit,
    "max_output_tokens": Outcome.output_limit,
    "max_total_tokens": Outcome.context_limit,
}

_LIMITS: dict[str, Outcome] = {
    "AgentTimeoutError": Outcome.agent_timeout,
    "ContextLengthExceededError": Outcome.context_limit,
    "ContextWindowExceededError": Outcome.context_limit,
    "OutputLengthExceededError": Outcome.output_limit,
}

_BY_PHASE: dict[Phase, Outcome] = {
    "environment_setup": Outcome.sandbox_error,
    "agent_setup": Outcome.agent_error,
    "agent": Outcome.agent_error,
    "verification": Outcome.verifier_error,
}

_STOPPED = re.compile(r"rollout stopped: (\w+)")

# A step's or a trial's worst outcome first: what explains the rest stands before it.
_WORST_FIRST = (
    Outcome.cancelled,
    Outcome.sandbox_error,
    Outcome.model_error,
    Outcome.agent_error,
    Outcome.verifier_error,
    Outcome.agent_timeout,
    Outcome.context_limit,
    Outcome.output_limit,
    Outcome.turn_limit,
    Outcome.completed,
)


def finite(rewards: Mapping[str, float] | None) -> bool:
    """Whether there are rewards and every one of them is a finite number."""
    return bool(rewards) and all(isinstance(value, int | float) and math.isfinite(value) for value in rewards.values())


def classify(
    *,
    rewards: Mapping[str, float] | None,
    exception: str | None = None,
    message: str = "",
    phase: Phase = "agent",
    ending: Outcome | None = None,
    stop: str | None = None,
) -> Outcome:
    """The outcome of one trial, or of one step of it.

    Args:
        rewards: What the verifier gave; None when it gave nothing.
        exception: Type name of what Harbor recorded as the failure, `NonZeroAgentExitCodeError` for example.
        message: That exception's message.
        phase: Where the trial stood when it was raised.
        ending: The limit at which the agent says it ended by itself.
        stop: The condition on which the interception endpoint stopped the rollout (`max_turns`, ...).

    Returns:
        An outcome that trains only when every reward is a finite number.
    """
    limit = ending or ending_of(stop) or stopped_by(message)
    cause = _cause(exception, phase, limit) if exception else limit or Outcome.completed
    if cause.trains and not finite(rewards):
        return _without_reward(exception, cause)
    return cause


def worst(outcomes: list[Outcome]) -> Outcome:
    """The outcome of a trial of several steps: the one that explains the most.

    Raises:
        ValueError: There are no outcomes.
    """
    return min(outcomes, key=_WORST_FIRST.index)


def _cause(exception: str, phase: Phase, limit: Outcome | None) -> Outcome:
    if exception in names.CANCELLED:
        return Outcome.cancelled
    if exception in names.SANDBOX:
        return Outcome.sandbox_error
    if exception in names.VERIFIER:
        return Outcome.verifier_error
    if phase in ("environment_setup", "verification"):
        return _BY_PHASE[phase]
    if exception in _LIMITS:
        return _LIMITS[exception]
    if limit is not None and (exception in names.MODEL or exception in names.AGENT_EXIT):
        return limit
    if exception in names.MODEL:
        return Outcome.model_error
    return _BY_PHASE[phase]


def _without_reward(exception: str | None, cause: Outcome) -> Outcome:
    """Nothing to train on: the agent raised and Harbor skipped the verifier, or that failed itself."""
    if exception is not None and cause is not Outcome.agent_timeout:
        return Outcome.agent_error
    return Outcome.verifier_error


def ending_of(stop: str | None) -> Outcome | None:
    """The end that a stop condition means: a limit, or `completed` for a stop of the task's own.

    Returns:
        None when there was no stop or an error was the reason for it.
    """
    if stop is None or stop in ("", "None", "error"):
        return None
    return STOPS.get(stop, Outcome.completed)


def stopped_by(message: str) -> Outcome | None:
    """The end that the interception endpoint's refusal means, None when `message` is no such refusal.

    Example:
        >>> stopped_by("400: rollout stopped: max_turns")
        <Outcome.turn_limit: 'turn_limit'>
    """
    found = _STOPPED.search(message)
    return ending_of(found.group(1)) if found else None
