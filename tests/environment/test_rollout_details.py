"""Harbor's recorded tokens become a trace, or the trial fails."""

import math

import pytest
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask

from harbortrainer.environment.plugin_config import HarborEnvConfig
from harbortrainer.environment.rollout_details import commit_turns
from harbortrainer.runs.trace_transcript import as_list
from harbortrainer.trials.faults import TokensMissingError
from harbortrainer.trials.record import TurnTokens


def empty_trace() -> Trace:
    agent = HarborEnvConfig.model_fields["agent"].default
    return Trace(task=TraceTask(type="Task", data=TaskData()), agent=AgentInfo(config=agent))


def turn(prompt: list[int], completion: list[int], *, cut: bool = False) -> TurnTokens:
    return TurnTokens(
        prompt_ids=prompt, completion_ids=completion, logprobs=[-token / 10 for token in completion], cut=cut
    )


def branches(trace: Trace) -> list[tuple[list[int], list[bool], object]]:
    branches = trace.branches
    return [(as_list(b.token_ids), as_list(b.sampled_mask), pytest.approx(as_list(b.logprobs))) for b in branches]


def test_extending_prompts_are_one_branch() -> None:
    trace = empty_trace()
    commit_turns(trace, [turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6])], "m")
    assert branches(trace) == [
        ([1, 2, 3, 4, 5, 6], [False, False, True, True, False, True], [0, 0, -0.3, -0.4, 0, -0.6])
    ]
    assert trace.num_turns == 2
    assert trace.num_output_tokens == 3


def test_rewritten_history_forks_and_shares_its_prefix() -> None:
    trace = empty_trace()
    commit_turns(trace, [turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 9], [5])], "m")
    assert [ids for ids, _, _ in branches(trace)] == [[1, 2, 3, 4], [1, 2, 9, 5]]
    shared = [node for node in trace.branches[0].nodes if any(node is other for other in trace.branches[1].nodes)]
    assert [node.sampled for node in shared].count(True) == 1, "the first answer trains once"


def test_unrelated_prompt_is_another_root() -> None:
    trace = empty_trace()
    commit_turns(trace, [turn([1, 2], [3]), turn([7, 8], [9])], "m")
    assert [ids for ids, _, _ in branches(trace)] == [[1, 2, 3], [7, 8, 9]]


def test_same_prompt_twice_is_two_branches() -> None:
    trace = empty_trace()
    commit_turns(trace, [turn([1, 2], [3]), turn([1, 2], [4])], "m")
    assert [ids for ids, _, _ in branches(trace)] == [[1, 2, 3], [1, 2, 4]]


def test_cut_answer_is_trained_on() -> None:
    trace = empty_trace()
    commit_turns(trace, [turn([1], [2, 3], cut=True), turn([1, 2, 3, 4], [5])], "m")
    assert branches(trace)[0][0] == [1, 2, 3, 4, 5]
    assert [call.finish_reason for call in trace.calls] == ["length", "stop"]


@pytest.mark.parametrize(
    "broken",
    [
        TurnTokens(prompt_ids=[1], completion_ids=[2, 3], logprobs=[-0.1]),
        TurnTokens(prompt_ids=[1], completion_ids=[2], logprobs=[math.nan]),
        TurnTokens(prompt_ids=[1], completion_ids=[2], logprobs=[-math.inf]),
        TurnTokens(prompt_ids=[1], completion_ids=[2], logprobs=[5.0]),
        TurnTokens(prompt_ids=[1], completion_ids=[-2], logprobs=[-0.1]),
        TurnTokens(prompt_ids=[-1], completion_ids=[2], logprobs=[-0.1]),
        TurnTokens(prompt_ids=[], completion_ids=[2], logprobs=[-0.1]),
        TurnTokens(prompt_ids=[1], completion_ids=[], logprobs=[]),
    ],
)
def test_incomplete_turn_fails_trial_without_tokens(broken: TurnTokens) -> None:
    trace = empty_trace()
    with pytest.raises(TokensMissingError, match="turn 2"):
        commit_turns(trace, [turn([1], [2]), broken], "m")
    assert trace.nodes == []


def test_server_without_token_ids_fails_trial() -> None:
    with pytest.raises(TokensMissingError, match="return_token_ids"):
        commit_turns(empty_trace(), [], "m")
