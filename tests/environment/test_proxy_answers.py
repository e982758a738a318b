"""The model proxy's answers and events match the types of the APIs' makers."""

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from harbortrainer.environment.model_proxy.anthropic_messages import AnthropicMessages
from harbortrainer.environment.model_proxy.dialect import ChatCompletions, Dialect, MessageNormalizer
from harbortrainer.environment.model_proxy.openai_responses import OpenAIResponses

CALL = {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
SAID = {
    "text": {"content": "Done."},
    "nothing": {"content": ""},
    "a call": {"content": None, "tool_calls": [CALL]},
    "all": {"content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    "cut in its thinking": {"content": "", "reasoning_content": "Hm."},
}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
DIALECTS: dict[str, tuple[Dialect, dict, Any, Any]] = {
    "chat completions": (
        ChatCompletions(),
        {"messages": [], "stream_options": {"include_usage": True}},
        ChatCompletion,
        ChatCompletionChunk,
    ),
    "messages": (
        AnthropicMessages(),
        {"max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]},
        Message,
        RawMessageStreamEvent,
    ),
    "responses": (OpenAIResponses(), {"input": "Hello"}, Response, ResponseStreamEvent),
}
"""How each is spoken, a request, and its maker's models of the answer and of an event."""


def completion(said: str, usage: dict = USAGE) -> Any:
    ends = "tool_calls" if "tool_calls" in SAID[said] else "length" if said.startswith("cut") else "stop"
    choice = {"index": 0, "finish_reason": ends, "message": {"role": "assistant", **SAID[said]}}
    return {"id": "1", "created": 1, "model": "m", "object": "chat.completion", "choices": [choice], "usage": usage}


def data_of(events: list[bytes]) -> list[dict]:
    lines = [line for event in events for line in event.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_answer_matches_types_of_api_maker(dialect: str, said: str) -> None:
    spoken, asked, whole, event = DIALECTS[dialect]
    body = {"model": "m", **asked}
    answer = spoken.answer(completion(said), body)
    TypeAdapter(whole).validate_python(answer)
    events = data_of(spoken.events(answer, body))
    assert len(events) > 1
    for data in events:
        TypeAdapter(event).validate_python(data)


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": {"cached_tokens": 2}}])
def test_missing_usage_details_are_zero(details: dict) -> None:
    response = OpenAIResponses().answer(completion("text", USAGE | details), {"model": "m", "input": "Hello"})
    usage = Response.model_validate(response).usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 2, 5)
    assert usage.input_tokens_details.cached_tokens == (2 if details else 0)
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_encrypted_reasoning_is_decoded() -> None:
    spoken, asked = OpenAIResponses(), [{"role": "user", "content": "Hello"}]
    output: Any = spoken.answer(completion("all"), {"model": "m", "input": asked})["output"]
    assert output[0].pop("content") == [{"type": "reasoning_text", "text": "Hm."}]
    messages: Any = spoken.to_chat({"model": "m", "input": asked + output})["messages"]
    assert [message.get("reasoning_content") for message in messages] == [None, "Hm."]


def test_thinking_keeps_sampled_whitespace() -> None:
    history = MessageNormalizer()
    sampled = completion("all")
    sampled["choices"][0]["message"]["reasoning_content"] = "\nHm.\n"
    history.to_agent(sampled)
    told: Any = history.to_endpoint({"messages": [{"role": "assistant", "reasoning_content": "Hm."}]})["messages"]
    assert [message["reasoning_content"] for message in told] == ["\nHm.\n"]
