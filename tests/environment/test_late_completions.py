"""Completions that arrive after the agent's time do not train."""

from itertools import product

import numpy as np
import pytest
from test_rollout_details import empty_trace, turn
from verifiers.v1 import types
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import TimeSpan

from harbortrainer.environment.rollout_details import commit_turns
from harbortrainer.environment.rollout_state import AgentPhases, discard_late_completions
from harbortrainer.runs.trace_transcript import as_list


def timed(spans: list[tuple[float, float]]):
    trace = empty_trace()
    prompt, turns = [1], []
    for number, _ in enumerate(spans):
        turns.append(turn(list(prompt), [100 + number]))
        prompt += [100 + number, 2]
    commit_turns(trace, turns, "m")
    for call, (start, end) in zip(trace.calls, spans, strict=True):
        call.time = TimeSpan(start=start, end=end)
    return trace


def test_completion_within_phase_stays() -> None:
    trace = timed([(0, 1), (2, 3)])
    phases = AgentPhases()
    phases.ends = [3.0]
    assert discard_late_completions(trace, phases) == 0
    assert trace.num_turns == 2


def test_late_completion_is_removed_with_its_prompt() -> None:
    trace = timed([(0, 1), (2, 9)])
    phases = AgentPhases()
    phases.ends = [3.0]
    assert discard_late_completions(trace, phases) == 1
    assert [as_list(branch.token_ids) for branch in trace.branches] == [[1, 100]]
    assert trace.num_turns == 1
    assert trace.calls[1].node is None


def test_late_completion_between_steps_is_masked() -> None:
    trace = timed([(0, 1), (2, 6), (5, 7)])
    phases = AgentPhases()
    phases.ends = [3.0, 8.0]
    assert discard_late_completions(trace, phases) == 1
    (branch,) = trace.branches
    sampled = [token for token, mine in zip(branch.token_ids, branch.sampled_mask, strict=True) if mine]
    assert sampled == [100, 102]
    assert len(branch.logprobs) == len(branch.token_ids)


@pytest.mark.parametrize(("start", "kept"), [(3.5, 1), (4.5, 2), (8.5, 1)], ids=["between steps", "step", "grading"])
def test_completion_that_no_agent_requested_is_removed(start: float, kept: int) -> None:
    trace = timed([(1, 2), (start, start + 0.2)])
    phases = AgentPhases()
    phases.starts, phases.ends = [0.0, 4.0], [3.0, 8.0]
    assert discard_late_completions(trace, phases) == 2 - kept
    assert trace.num_turns == kept


def test_rows_of_late_completion_are_removed() -> None:
    """Kept sets and other candidates of the sampled tokens, as vLLM returns them."""
    trace = timed([(0, 1), (2, 6), (5, 7)])
    rows = {
        "kept_tokens": {"ids": np.array([7, 8]), "counts": np.array([2])},
        "sampling_mask": {"ids": np.array([7, 8]), "counts": np.array([2])},
        "top_logprobs": {"ids": np.array([7]), "logprobs": np.array([-0.1]), "counts": np.array([1])},
    }
    known = rows.keys() & MessageNode.model_fields.keys()
    assert known, "each release has at least one"
    for node, name in product((node for node in trace.nodes if node.sampled), known):
        setattr(node, name, getattr(types, _KINDS[name])(**rows[name]))
    phases = AgentPhases()
    phases.ends = [3.0, 8.0]
    assert discard_late_completions(trace, phases) == 1
    (branch,) = trace.branches
    for name in known:
        left = getattr(branch, name)
        assert left.counts.sum() == len(left.ids) == 2 * len(rows[name]["ids"])


_KINDS = {"kept_tokens": "KeptTokens", "sampling_mask": "SamplingMask", "top_logprobs": "TopLogprobs"}


def test_late_only_completion_leaves_no_trained_tokens() -> None:
    trace = timed([(0, 9)])
    phases = AgentPhases()
    phases.ends = [3.0]
    discard_late_completions(trace, phases)
    assert trace.branches == []
    assert trace.num_turns == 0


async def test_starts_and_ends_of_all_phases_are_recorded() -> None:
    phases = AgentPhases()
    for event in ["start", "agent-start", "agent-end", "verification-start", "agent-start", "agent-end", "end"]:
        await phases.on_event(event)
    assert len(phases.ends) == 2
    assert [(phase.start, phase.end) for phase in phases.finished] == list(zip(phases.starts, phases.ends, strict=True))
