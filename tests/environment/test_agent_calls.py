"""Agent calls and invalid tokens read from a verifiers trace, and context limits of servers."""

import math

import pytest
from test_rollout_details import empty_trace, turn
from verifiers.v1.trace import Error, ModelCall, TimeSpan, Trace

from harbortrainer.environment.model_server import read_context_limit
from harbortrainer.environment.rollout_details import commit_turns
from harbortrainer.environment.verifiers_compat import agent_calls, invalid_logprobs


def with_calls(*calls: ModelCall) -> Trace:
    trace = empty_trace()
    trace.calls.extend(calls)
    return trace


def call(start: float, end: float, *, node: int | None = 0, error: Error | None = None) -> ModelCall:
    return ModelCall(node=None if error else node, time=TimeSpan(start=start, end=end), error=error)


def failure(kind: str, status: int | None) -> Error:
    return Error(type=kind, message="m", status_code=status)


def test_unanswered_call_is_known_by_its_arrival():
    trace = with_calls(call(1.1, 2), call(3.1, 4))
    seen = agent_calls(trace, [1.0, 3.0, 5.0])
    assert [(c.start, c.end, c.status) for c in seen] == [
        (1.1, 2, "answered"),
        (3.1, 4, "answered"),
        (5.0, None, "waiting"),
    ]


def test_concurrent_calls_are_distinguished():
    assert [(c.start, c.status) for c in agent_calls(with_calls(call(2.1, 4)), [1.0, 2.0])] == [
        (1.0, "waiting"),
        (2.1, "answered"),
    ]


@pytest.mark.parametrize(
    ("kind", "code", "status"),
    [
        ("ProviderError", 500, "failed"),
        ("ProviderError", 503, "failed"),
        ("ProviderError", 429, "failed"),
        ("ProviderError", 404, "failed"),
        ("JSONDecodeError", None, "failed"),
        ("MalformedGenerateResponseError", None, "failed"),
        ("ProviderError", 400, "rejected"),
        ("ProviderError", 422, "rejected"),
        ("OverlongPromptError", 400, "refused"),
    ],
)
def test_server_faults_differ_from_caller_faults(kind: str, code: int | None, status: str):
    (seen,) = agent_calls(with_calls(call(1, 2, error=failure(kind, code))), [0.9])
    assert seen.status == status


@pytest.mark.parametrize(
    ("logprobs", "ids", "what"),
    [
        ([5.0], [3], "above 0"),
        ([math.nan], [3], "not a finite number"),
        ([-1.0, -1.0], [3], "1 sampled tokens but 2"),
        ([-1.0], [-3], "negative token id"),
    ],
)
def test_invalid_tokens_are_reported_with_answer_number(logprobs: list[float], ids: list[int], what: str):
    trace = empty_trace()
    commit_turns(trace, [turn([1], [2]), turn([1, 2, 5], [3])], "m")
    assert invalid_logprobs(trace) == ""
    trace.nodes[-1].logprobs = logprobs
    trace.nodes[-1].token_ids[-1:] = ids
    assert invalid_logprobs(trace).startswith("answer 2: ")
    assert what in invalid_logprobs(trace)


@pytest.mark.parametrize("reply", [None, [], {}, {"data": None}, {"data": ["x"]}, {"data": [{"id": "m"}]}])
def test_context_limit_is_none_if_not_reported(reply: object):
    assert read_context_limit(reply, "m") is None


def test_adapter_has_context_limit_of_its_base():
    cards = [{"id": "base", "max_model_len": 4096}, {"id": "r8", "parent": "base", "max_model_len": None}]
    assert read_context_limit({"data": cards}, "r8") == 4096
    assert read_context_limit({"data": cards}, "base") == 4096
