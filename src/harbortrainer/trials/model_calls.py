"""Model calls of a trial, recent latencies of a server, and whether the server caused the end of a trial.

- `AgentCall` has start, end and status of one call. They come from the interception endpoint, or from `record_calls`
  around the client of an agent that calls the server directly.
- `engine_fault` describes a failure of the server. The agent's limit then does not count against the policy. A failure
  is: no call was answered (a rejected call is not), the last call of a phase failed, or a call waited far too long.

Times are in seconds since the epoch.
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from harbortrainer.trials.faults import RolloutEnd

if TYPE_CHECKING:
    from harbor.llms.base import BaseLLM

type CallStatus = Literal["answered", "refused", "rejected", "failed", "waiting"]
"""Refused: correctly not answered, since the prompt is too long or the rollout is over. Rejected: the server cannot
read the request, because of the agent or of the server's settings."""

_STATUS_OF_ERROR: dict[str, CallStatus] = {
    "ContextLengthExceededError": "refused",
    "OutputLengthExceededError": "answered",
}
# Phrases of servers for a prompt that is too long; tests/trials/test_prompt_too_long.py has the full messages.
_TOO_LONG = (
    "context length exceeded",
    "context_length_exceeded",
    "maximum context length",
    "maximum model length",
    "model's context length",
    "available context size",
    "exceeds the context window",
    "tokens) exceeds the maximum allowed length",
    "`inputs` tokens + `max_new_tokens`",
    "max_tokens must be at least 1, got -",
    "prompt is too long",
    "maximum prompt length is",
    "exceeds the maximum number of tokens",
    "input is too long for requested model",
    "input tokens exceed the configured limit",
)
_LONG_ANSWER_FACTOR = 2.0  # a long answer may be sampled this much slower than usual


@dataclass
class AgentCall:
    """One model call of an agent."""

    start: float
    end: float | None = None
    status: CallStatus = "waiting"
    tokens: int = 0
    """Tokens of the answer; 0 if unknown."""
    error: str = ""
    """Type and message of the error, if the call failed."""


class RecentLatencies:
    """Latencies of the last 512 answers of one server, and the longest normal wait derived from them."""

    def __init__(self, factor: float = 10.0, least_s: float = 30.0) -> None:
        self._factor, self._least_s = factor, least_s
        self._seconds: deque[float] = deque(maxlen=512)
        self._seconds_per_token: deque[float] = deque(maxlen=512)

    def add(self, calls: Iterable[AgentCall]) -> None:
        """Add the latencies of the answered calls."""
        for call in calls:
            if call.status == "answered" and call.end is not None:
                self._seconds.append(call.end - call.start)
                if call.tokens:
                    self._seconds_per_token.append((call.end - call.start) / call.tokens)

    def max_wait_s(self, tokens: int | None) -> float:
        """Return the longest wait, in seconds, that sampling itself can explain.

        Args:
            tokens: Length of the answer, or its largest allowed length; None if unknown. Sampling that many tokens at
                the usual speed is no server fault.
        """
        waits = [self._least_s]
        if self._seconds:
            waits.append(self._factor * statistics.median(self._seconds))
        if tokens and self._seconds_per_token:
            waits.append(_LONG_ANSWER_FACTOR * tokens * statistics.median(self._seconds_per_token))
        return max(waits)


def is_prompt_too_long(message: str) -> bool:
    """Whether a server's refusal says that the prompt does not fit into the model's context.

    Example:
        >>> is_prompt_too_long("This model's maximum context length is 4096 tokens.")
        True
    """
    return any(phrase in message.lower() for phrase in _TOO_LONG)


def record_calls(model: "BaseLLM") -> list[AgentCall]:
    """Record every call of this client from now on. Returns the growing list."""
    calls: list[AgentCall] = []
    original = model.call

    async def recorded(*args: object, **kwargs: object) -> object:
        call = AgentCall(start=time.time())
        calls.append(call)
        try:
            answer = await original(*args, **kwargs)  # ty: ignore[invalid-argument-type] - passed through
        except asyncio.CancelledError:
            raise  # the agent's time is up; the call stays `waiting`
        except Exception as error:  # any client's error; recorded for the review and raised again
            default = "refused" if isinstance(error, RolloutEnd) else "failed"
            call.end, call.status = time.time(), _STATUS_OF_ERROR.get(type(error).__name__, default)
            call.error = f"{type(error).__name__}: {error}"
            raise
        usage = answer.usage
        call.end, call.status, call.tokens = time.time(), "answered", usage.completion_tokens if usage else 0
        return answer

    setattr(model, "call", recorded)  # noqa: B010 - this object only, not its class
    return calls


@dataclass(frozen=True)
class AgentPhase:
    """Start and end of an agent's run, in seconds since the epoch; a multi-step trial has one phase per step."""

    start: float
    end: float


def engine_fault(
    calls: Sequence[AgentCall],
    phases: Sequence[AgentPhase],
    recent: RecentLatencies,
    *,
    endpoint: str,
    max_tokens: int | None = None,
    timed_out: bool = False,
) -> str:
    """Describe the server's fault that ended the trial; "" if there is none.

    Args:
        calls: The agent's calls by start time.
        phases: The agent's phases. If empty, the agent never ran and there is no fault.
        recent: Recent latencies of the server, including these calls.
        endpoint: Address for the agent's calls, for the message.
        max_tokens: Largest allowed length of an answer.
        timed_out: Whether the agent's time was up. An answer that came far too late is then a fault too.
    """
    if not phases:
        return ""
    if not calls:
        return f"no model call of the agent reached {endpoint}: it made none, or its sandbox cannot reach this address"
    by_phase = [[call for call in calls if phase.start <= call.start <= phase.end] for phase in phases]
    if not any(_answered_in_time(call, phase) for phase, mine in zip(phases, by_phase, strict=True) for call in mine):
        waited = min(calls[0].end or phases[-1].end, phases[-1].end) - calls[0].start
        last = next((f"; the last error: {call.error}" for call in reversed(calls) if call.error), "")
        return f"none of {len(calls)} model calls was answered in time; the first waited {waited:.1f} s{last}"
    for phase, mine in zip(phases, by_phase, strict=True):
        ended = [call for call in mine if call.end is not None and call.end <= phase.end]
        if ended and (last_call := max(ended, key=lambda call: call.end or 0.0)).status == "failed":
            return f"the last model call failed: {last_call.error}"
        for call in mine:
            if stalled := _stalled(call, phase, recent, max_tokens, timed_out=timed_out):
                return stalled
    return ""


def _answered_in_time(call: AgentCall, phase: AgentPhase) -> bool:
    return call.status in ("answered", "refused") and call.end is not None and call.end <= phase.end


def _stalled(
    call: AgentCall, phase: AgentPhase, recent: RecentLatencies, max_tokens: int | None, *, timed_out: bool
) -> str:
    waiting = call.end is None or call.end > phase.end
    if not waiting and not (timed_out and call.status == "answered"):
        return ""
    allowed = recent.max_wait_s(max_tokens if waiting else call.tokens)
    waited = (phase.end if waiting else call.end or phase.end) - call.start
    if waited <= allowed:
        return ""
    event = "was still waiting when the agent's time ended, after" if waiting else "was answered only after"
    return f"a model call {event} {waited:.1f} s; at most {allowed:.1f} s is normal for this server"
