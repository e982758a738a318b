"""Requests, retries, kept tokens and named errors of the chat client."""

import pytest
from fakes import Reply, ScriptedModel
from harbor.llms.base import ContextLengthExceededError, OutputLengthExceededError

from harbortrainer.trials.chat_client import ChatClient, ClientSettings
from harbortrainer.trials.faults import ModelServerError, RolloutEnd, TokensMissingError
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.tokens import ChatCompletion, turn_tokens


def client(url: str, **settings) -> ChatClient:
    return ChatClient(
        ClientSettings(model="m", base_url=url, backoff_s=0.01, **settings),
        api_key="sk-1",
        sampling={"temperature": 0.7},
    )


async def test_sends_history_key_and_sampling():
    async with ScriptedModel(["hello"]).serve() as model:
        llm = client(model.url)
        answer = await llm.call("hi", message_history=[{"role": "user", "content": "a"}], top_p=0.9)
        await llm.aclose()
    assert answer.content == "hello"
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    assert [message["content"] for message in model.requests[0]["messages"]] == ["a", "hi"]
    assert model.requests[0]["temperature"] == 0.7 and model.requests[0]["top_p"] == 0.9
    assert "return_token_ids" not in model.requests[0]
    assert model.headers[0]["Authorization"] == "Bearer sk-1"


async def test_keeps_tokens_of_cut_answer():
    async with ScriptedModel([Reply(content="ab", cut=True)]).serve() as model:
        llm = client(model.url, collect_tokens=True)
        with pytest.raises(OutputLengthExceededError) as cut:
            await llm.call("hi")
        await llm.aclose()
    assert cut.value.truncated_response == "ab"
    assert llm.turns[0].completion_ids == [97, 98]
    assert llm.turns[0].logprobs == [-0.5, -0.5]
    assert llm.turns[0].cut


async def test_repeatedly_cut_answers_end_the_run():
    async with ScriptedModel([Reply(content="ab", cut=True)]).serve() as model:
        llm = client(model.url, max_cut_answers=2)
        for _ in range(2):
            with pytest.raises(OutputLengthExceededError):
                await llm.call("hi")
        with pytest.raises(RolloutEnd) as end:
            await llm.call("hi")
        await llm.aclose()
    assert end.value.ending is Outcome.output_limit


async def test_unreachable_server_is_retried_then_named():
    llm = client("http://127.0.0.1:9/v1", retries=1)
    with pytest.raises(ModelServerError, match="after 2 tries: ClientConnectorError"):
        await llm.call("hi")
    await llm.aclose()


async def test_retry_is_marked_so_endpoint_does_not_sample_again():
    async def flaky(_: dict) -> str | Reply:
        return "late" if len(model.requests) > 1 else Reply(status=500, error="oops")

    async with ScriptedModel([flaky]).serve() as model:
        llm = client(model.url)
        answer = await llm.call("hi")
        await llm.aclose()
    assert answer.content == "late"
    assert [headers.get("x-stainless-retry-count") for headers in model.headers] == [None, "1"]


@pytest.mark.parametrize(
    ("reply", "exception", "calls"),
    [
        (Reply(status=400, error="This model's maximum context length is 8 tokens"), ContextLengthExceededError, 1),
        (
            Reply(status=400, error="Prompt length (9) exceeds maximum context length (8)."),
            ContextLengthExceededError,
            1,
        ),
        (Reply(status=400, error="rollout stopped: max_turns"), RolloutEnd, 1),
        (Reply(status=401, error="no"), ModelServerError, 1),
        (Reply(status=503, error="busy"), ModelServerError, 3),
    ],
)
async def test_refusal_raises_named_error(reply, exception, calls):
    async with ScriptedModel([reply]).serve() as model:
        llm = client(model.url)
        with pytest.raises(exception):
            await llm.call("hi")
        await llm.aclose()
    assert len(model.requests) == calls


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [1, 2]},
        {"logprobs": {"content": [{"logprob": -1.0}]}},
        {"token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1.0}]}},
        {"token_ids": [1], "logprobs": {"content": [{"logprob": float("nan")}]}},
    ],
)
def test_mismatched_tokens_are_an_error(choice):
    reply = {"prompt_token_ids": [5], "choices": [{"message": {}, **choice}]}
    completion = ChatCompletion.model_validate(reply)
    with pytest.raises(TokensMissingError):
        turn_tokens(completion, cut=False)


async def test_trials_share_connections_until_last_one_ends():
    async with ScriptedModel(["hello"]).serve() as model:
        first, second = client(model.url), client(model.url)
        await first.call("hi")
        connections = first._connections
        await second.call("hi")
        assert second._connections is connections and connections is not None
        await first.aclose()
        assert not connections.session.closed
        await second.aclose()
        assert connections.session.closed
        assert (await first.call("again")).content == "hello"
        await first.aclose()
