"""State of a running rollout that task and harness share: attempts, agent phases, the trace's error.

- Retries. verifiers runs an agent again, with a new trace, if the trace ended with an error of a listed class. One
  trace therefore never holds tokens of two attempts. The outcome table has the retries per outcome, but verifiers takes
  one number for all, so the error's class says whether another attempt is due. An outcome that trains is no error.
- Late completions. When the agent's time ends, the server still completes the running request. The completion is
  committed to the trace although no agent acts on it. After `discard_late_completions`, every sampled token of the
  trace was delivered while its agent was running.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict, Field
from verifiers.v1.errors import RolloutError
from verifiers.v1.state import State
from verifiers.v1.trace import ModelCall, Trace

from harbortrainer.environment.verifiers_compat import remove_sampled_tokens
from harbortrainer.trials.model_calls import AgentPhase
from harbortrainer.trials.outcome import FINAL, Outcome
from harbortrainer.trials.record import TrialRecord


class AgentPhases:
    """Starts and ends of the agent's phases, in seconds since the epoch; a multi-step trial has one phase per step."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    async def on_event(self, event: str) -> None:
        """Record a Harbor event; awaited inside the trial."""
        if event == "agent-start":
            self.starts.append(time.time())
        if event == "agent-end":
            self.ends.append(time.time())

    @property
    def finished(self) -> list[AgentPhase]:
        """Phases that have ended."""
        return [AgentPhase(start, end) for start, end in zip(self.starts, self.ends, strict=False)]

    def is_late(self, call: ModelCall) -> bool:
        """Whether the call was running when a phase ended, or began after one and before the next."""
        started = sum(start <= call.time.start for start in self.starts)
        ended = sum(end < call.time.start for end in self.ends)
        return 0 < started == ended or any(call.time.start <= end < call.time.end for end in self.ends)


def discard_late_completions(trace: Trace, phases: AgentPhases) -> int:
    """Remove the tokens of late completions from a sealed trace. Returns the number of completions removed."""
    late = [call for call in trace.calls if call.node is not None and phases.is_late(call)]
    remove_sampled_tokens(trace, late)
    return len(late)


class TrialRetriedError(RolloutError):
    """A trial failed, not because of the policy, and will be retried."""


class TrialFailedError(RolloutError):
    """A trial failed, and its outcome has no retries left."""


@dataclass
class Attempts:
    """Failed attempts of one episode so far, by outcome."""

    failures: Counter[Outcome] = field(default_factory=Counter)
    pause_s: float = 0.0
    """Seconds to wait before the next attempt."""

    @property
    def count(self) -> int:
        """Number of failed attempts."""
        return self.failures.total()

    def count_failure(self, outcome: Outcome) -> bool:
        """Count a failure. Returns whether another attempt is due."""
        self.failures[outcome] += 1
        self.pause_s = outcome.pause_s * 2 ** (self.failures[outcome] - 1)
        return self.failures[outcome] <= outcome.retries


def trace_error(record: TrialRecord | None, attempts: Attempts) -> RolloutError | None:
    """Return the error that ends the trial's trace, None if its outcome trains. Counts the failure in `attempts`.

    Args:
        record: Record of the trial; None if it never ended.
        attempts: Failed attempts of the episode.
    """
    if record is None:
        return TrialFailedError(f"{Outcome.cancelled}: the trial was stopped before it ended")
    if record.outcome.trains:
        return None
    detail = f"{record.error.type}: {record.error.message}" if record.error else "no details were recorded"
    where = f" (task {record.task}{f', {record.trial_dir}' if record.trial_dir else ''})"
    final = record.error is not None and record.error.type in FINAL
    error = TrialRetriedError if attempts.count_failure(record.outcome) and not final else TrialFailedError
    return error(f"{record.outcome}: {detail}{where}")


class HarborState(State):
    """Live state of a rollout. It never leaves the process."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    attempts: Attempts = Field(default_factory=Attempts)
    """Failed attempts of the episode so far; shared by all its attempts."""
    folder: Path | None = None
    """The task's folder on this machine, if it may differ from the path in the task's data."""
    phases: AgentPhases = Field(default_factory=AgentPhases)
    """Starts and ends of the agent's phases."""
    call_arrivals: list[float] = Field(default_factory=list)
    """Time at which each model call reached the interception endpoint, in seconds since the epoch."""
    failure: RolloutError | None = Field(default_factory=lambda: trace_error(None, Attempts()))
    """Reason why the trace does not train, `cancelled` until the trial ends; None if it trains."""


def harbor_state(trace: Trace) -> HarborState:
    """Return the live state of a rollout of a Harbor task."""
    if not isinstance(trace.state, HarborState):
        raise TypeError("this is not a rollout of a Harbor task; use the taskset harbor_env")
    return trace.state
