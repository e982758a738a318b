"""Answers that came too late do not count.

An HTTP server does not notice that its caller has gone: when Harbor's clock ends the agent's phase, the
answer that was being sampled still arrives and is committed to the trace, although no agent ever acted on it.
Invariant: after `forget_late_answers`, every sampled token of the trace was given to an agent that was still
playing.
"""

import time

from verifiers.v1.trace import ModelCall, Trace

from harbortrainer.environment.verifiers_side import unsample
from harbortrainer.trials.engine_faults import AgentPhase


class Phases:
    """When the agent's phases began and ended (a multi-step trial has one per step), in seconds since the epoch."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    async def on_event(self, event: str) -> None:
        """Follow Harbor's events; awaited inside the trial."""
        if event == "agent-start":
            self.starts.append(time.time())
        if event == "agent-end":
            self.ends.append(time.time())

    @property
    def played(self) -> list[AgentPhase]:
        """The phases that are over."""
        return [AgentPhase(start, end) for start, end in zip(self.starts, self.ends, strict=False)]

    def late(self, call: ModelCall) -> bool:
        """Whether a call was under way when a phase ended."""
        return any(call.time.start <= end < call.time.end for end in self.ends)


def forget_late_answers(trace: Trace, phases: Phases) -> int:
    """Take the tokens of late answers out of the trace, which must be sealed. Returns how many there were."""
    late = [call for call in trace.calls if call.node is not None and phases.late(call)]
    unsample(trace, late)
    return len(late)
