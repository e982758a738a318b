"""Server faults derived from an agent's calls; tests/e2e/test_model_faults.py has real servers."""

import asyncio

import pytest
from harbor.llms.base import BaseLLM, ContextLengthExceededError, LLMResponse, OutputLengthExceededError
from harbor.models.metric import UsageInfo

from harbortrainer.trials.faults import ModelServerError
from harbortrainer.trials.model_calls import AgentCall, AgentPhase, RecentLatencies, engine_fault, record_calls

HUNDRED_S = [AgentPhase(0, 100)]


def answered(start: float, end: float, tokens: int = 0) -> AgentCall:
    return AgentCall(start, end, "answered", tokens)


def failed(start: float, end: float) -> AgentCall:
    return AgentCall(start, end, "failed", 0, "ProviderError: 503")


def fault(
    calls: list[AgentCall],
    phases: list[AgentPhase] | None = None,
    *,
    max_tokens: int | None = None,
    timed_out: bool = True,
) -> str:
    recent = RecentLatencies()
    recent.add(calls)
    played = HUNDRED_S if phases is None else phases
    return engine_fault(calls, played, recent, endpoint="http://m/v1", max_tokens=max_tokens, timed_out=timed_out)


def test_working_server_is_not_blamed_for_timeout():
    assert fault([answered(0, 5), answered(6, 12), AgentCall(75)]) == ""


def test_missing_calls_name_the_endpoint():
    assert "no model call of the agent reached http://m/v1" in fault([])


def test_agent_that_never_ran_is_no_server_fault():
    assert fault([], []) == ""


def test_no_answer_in_time_is_server_fault():
    assert "none of 1 model calls" in fault([AgentCall(1)])
    assert "none of 1 model calls" in fault([answered(1, 101)])
    assert "waited 99.0 s; the last error: ProviderError: 503" in fault([AgentCall(1), failed(2, 3)])


def test_refusal_counts_as_answer():
    assert fault([AgentCall(1, 2, "refused")]) == ""


def test_only_rejected_calls_are_server_fault():
    rejected = AgentCall(1, 2, "rejected", 0, "ProviderError: 400 unknown argument: reasoning_effort")
    assert "none of 2 model calls" in fault([rejected, rejected], timed_out=False)
    assert "unknown argument" in fault([rejected], timed_out=False)
    assert fault([answered(0, 1), rejected], timed_out=False) == "", "what one answer led to is the policy's"
    assert fault([AgentCall(0, 1, "refused"), rejected], timed_out=False) == "", "the first prompt did not fit"


def test_call_waiting_longer_than_recent_answers_has_stalled():
    quick, slow = [answered(i, i + 1) for i in range(5)], [answered(i * 10, i * 10 + 6) for i in range(5)]
    assert "was still waiting when the agent's time ended, after 31.0 s" in fault([*quick, AgentCall(69)])
    assert fault([*quick, AgentCall(71)]) == "", "not before half a minute"
    assert fault([*slow, AgentCall(60)]) == "", "forty seconds are not ten times six"


def test_long_answer_at_usual_speed_is_no_server_fault():
    short = [answered(i, i + 1, tokens=20) for i in range(5)]
    assert fault([*short, AgentCall(10)], max_tokens=4096) == "", "4 096 tokens take 205 s at this speed"
    assert fault([*short, AgentCall(10)], max_tokens=512) != ""


def test_very_late_answer_before_timeout_is_server_fault():
    late = [*[answered(i, i + 1, tokens=20) for i in range(5)], answered(10, 90, tokens=20), AgentCall(91)]
    assert "answered only after 80.0 s" in fault(late)
    assert fault(late, timed_out=False) == "", "the agent came to its end all the same"
    thought = [*late[:5], answered(10, 90, tokens=1600), AgentCall(91)]
    assert fault(thought) == "", "a long answer at the usual speed"


def test_failed_last_call_of_any_step_is_server_fault():
    steps = [AgentPhase(0, 10), AgentPhase(20, 30)]
    assert "503" in fault([answered(0, 1), failed(2, 3), answered(21, 22)], steps)
    assert fault([failed(0, 1), answered(2, 3), answered(21, 22)], steps) == "", "the retry succeeded"


def test_settings_change_both_wait_limits():
    calls = [answered(0, 1), answered(1, 2), AgentCall(95)]
    recent = RecentLatencies(factor=2.0, least_s=3.0)
    recent.add(calls)
    assert "was still waiting when the agent's time ended, after 5.0 s" in engine_fault(
        calls, HUNDRED_S, recent, endpoint="", timed_out=True
    )


class Client(BaseLLM):
    """A client that raises an error or returns a fixed answer; the prompt `hang` waits."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error

    async def call(self, prompt: str, **kwargs: object) -> LLMResponse:
        await asyncio.sleep(60 if prompt == "hang" else 0)
        if self.error is not None:
            raise self.error
        return LLMResponse(
            content="", usage=UsageInfo(prompt_tokens=1, completion_tokens=7, cache_tokens=0, cost_usd=0)
        )

    def get_model_context_limit(self) -> int:
        return 1

    def get_model_output_limit(self) -> int | None:
        return None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "answered"),
        (ContextLengthExceededError(), "refused"),
        (OutputLengthExceededError("cut"), "answered"),
        (ModelServerError("down"), "failed"),
    ],
)
async def test_recorded_call_has_its_status(error: Exception | None, status: str):
    client = Client(error)
    calls = record_calls(client)
    await asyncio.gather(client.call("x"), return_exceptions=True)
    (call,) = calls
    assert (call.status, call.tokens) == (status, 0 if error else 7)
    assert call.end is not None and call.end >= call.start


async def test_cancelled_call_stays_waiting():
    client = Client()
    calls = record_calls(client)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.call("hang"), 0.05)
    assert [(call.status, call.end) for call in calls] == [("waiting", None)]
