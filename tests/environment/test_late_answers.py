"""An answer that arrives after the agent's time is over does not train."""

from test_rollout_details import empty_trace, turn
from verifiers.v1.trace import TimeSpan

from harbortrainer.environment.late_answers import Phases, forget_late_answers
from harbortrainer.environment.rollout_details import commit_turns


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


def test_an_answer_within_the_phase_stays() -> None:
    trace = timed([(0, 1), (2, 3)])
    phases = Phases()
    phases.ends = [3.0]
    assert forget_late_answers(trace, phases) == 0
    assert trace.num_turns == 2


def test_the_answer_that_came_too_late_is_gone_with_its_prompt() -> None:
    trace = timed([(0, 1), (2, 9)])
    phases = Phases()
    phases.ends = [3.0]
    assert forget_late_answers(trace, phases) == 1
    assert [branch.token_ids for branch in trace.branches] == [[1, 100]]
    assert trace.num_turns == 1
    assert trace.calls[1].node is None


def test_a_late_answer_between_two_steps_is_masked() -> None:
    trace = timed([(0, 1), (2, 6), (5, 7)])
    phases = Phases()
    phases.ends = [3.0, 8.0]
    assert forget_late_answers(trace, phases) == 1
    (branch,) = trace.branches
    sampled = [token for token, mine in zip(branch.token_ids, branch.sampled_mask, strict=True) if mine]
    assert sampled == [100, 102]
    assert len(branch.logprobs) == len(branch.token_ids)


def test_the_only_answer_too_late_leaves_nothing_to_train_on() -> None:
    trace = timed([(0, 9)])
    phases = Phases()
    phases.ends = [3.0]
    forget_late_answers(trace, phases)
    assert trace.branches == []
    assert trace.num_turns == 0


async def test_the_ends_of_all_phases_are_noted() -> None:
    phases = Phases()
    for event in ["start", "agent-start", "agent-end", "verification-start", "agent-start", "agent-end", "end"]:
        await phases.on_event(event)
    assert len(phases.ends) == 2
    assert [(phase.start, phase.end) for phase in phases.played] == list(zip(phases.starts, phases.ends, strict=True))
