"""Answers that came too late do not count.

An HTTP server does not notice that its caller has gone: when Harbor's clock ends the agent's phase, the
answer that was being sampled still arrives and is committed to the trace, although no agent ever acted on it.
Invariant: after `forget_late_answers`, every sampled token of the trace was given to an agent that was still
playing.
"""

import time

from verifiers.v1.trace import Error, ModelCall, Trace


class Phases:
    """When the agent's phases ended (a multi-step trial has one per step), in seconds since the epoch."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    async def on_event(self, event: str) -> None:
        """Follow Harbor's events; awaited inside the trial."""
        if event == "agent-end":
            self.ends.append(time.time())

    def late(self, call: ModelCall) -> bool:
        """Whether a call was under way when a phase ended."""
        return any(call.time.start <= end < call.time.end for end in self.ends)


def forget_late_answers(trace: Trace, phases: Phases) -> int:
    """Take the tokens of late answers out of the trace, which must be sealed. Returns how many there were."""
    late = [call for call in trace.calls if call.node is not None and phases.late(call)]
    for call in late:
        _unsample(trace, call)
    while late and trace.nodes and not trace.nodes[-1].sampled:
        trace.nodes.pop()
    return len(late)


def engine_failure(trace: Trace) -> Error | None:
    """The error of the last model call that came back, when it was the engine that failed."""
    error = trace.calls[-1].error if trace.calls else None
    if error is None or error.type != "ProviderError" or (error.status_code or 500) < 500:
        return None
    return error


def _unsample(trace: Trace, call: ModelCall) -> None:
    assert call.node is not None
    node = trace.nodes[call.node]
    node.sampled, node.mask, node.logprobs = False, [False] * len(node.token_ids), []
    call.node = None
