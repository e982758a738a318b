"""Dialects of the model proxy, and the normalization of a trial's message history.

- `Dialect` translates an agent's request into a chat completion request, and the completion into the agent's format.
- `ChatCompletions` is the endpoint's own dialect; it adds only streaming.
- `MessageNormalizer` keeps a history on one branch: a message has one canonical form however the agent writes it. It
  also gives tool calls unique ids, since the endpoint names the first call of every answer `call_0` and agents look up
  results by id.

Invariants of a request sent to the endpoint: a tool call with one of our ids has the endpoint's own id and the sampled
arguments. Thinking has the surrounding whitespace that was sampled, which agents and adapters strip.
"""

import itertools
import json
from collections.abc import Mapping
from typing import NotRequired, Protocol, TypedDict, cast

type Json = dict[str, object]


TRANSLATED = ("messages", "tools", "tool_choice")
"""Keys kept of a translated request; the run sets the sampling parameters."""


class CalledFunction(TypedDict):
    """Function of a tool call; `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


class CompletionToolCall(TypedDict):
    """A tool call in an answer."""

    id: str
    type: str
    function: CalledFunction


class CompletionMessage(TypedDict, total=False):
    """The message of a completion."""

    role: str
    content: str | None
    reasoning_content: str | None
    tool_calls: list[CompletionToolCall]


class CompletionChoice(TypedDict):
    """The single choice of a completion."""

    index: int
    message: CompletionMessage
    finish_reason: str | None


class WireCompletion(TypedDict):
    """A chat completion, as the endpoint returns it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Json | None]


class Dialect(Protocol):
    """An API format. `to_chat` raises ValueError, TypeError, KeyError or AttributeError for an unreadable request."""

    ping: bytes
    """Event that keeps a waiting stream alive."""

    def to_chat(self, body: Json) -> Json:
        """Translate a request into a chat completion request; only the keys in `TRANSLATED` are used."""
        ...

    def answer(self, completion: WireCompletion, body: Json) -> Json:
        """Translate a completion into the answer to the request `body`, which is given without its history."""
        ...

    def events(self, answer: Json, body: Json) -> list[bytes]:
        """Return the answer as stream events; `body` is given without its history."""
        ...

    def error(self, message: str) -> Json:
        """Return the body of an error response."""
        ...

    def error_event(self, message: str) -> bytes:
        """Return the error as an event of a started stream."""
        ...


def event(data: Mapping[str, object], name: str = "") -> bytes:
    """Encode one stream event."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(data).encode() + b"\n\n"


class MessageNormalizer:
    """Normalizes the messages of one trial, in both directions."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._calls: dict[str, CompletionToolCall] = {}
        self._thinking: dict[str, str] = {}

    def to_agent(self, completion: WireCompletion) -> WireCompletion:
        """Give tool calls unique ids, and remember the completion's calls and thinking."""
        for choice in completion["choices"]:
            message = choice["message"]
            if thinking := message.get("reasoning_content"):
                self._thinking[thinking.strip()] = thinking
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [self._with_unique_id(call) for call in calls]
                if choice["finish_reason"] == "stop":
                    choice["finish_reason"] = "tool_calls"
        return completion

    def _with_unique_id(self, call: CompletionToolCall) -> CompletionToolCall:
        # Nine alphanumeric characters: some agents shorten longer ids and remove other characters.
        name = f"call{next(self._numbers):05}"
        self._calls[name] = call
        return {**call, "id": name}

    def to_endpoint(self, request: Json) -> Json:
        """Return the request with canonical messages, and with the endpoint's own tool calls and thinking."""
        return request | {"messages": [self._restored(message) for message in cast("list[Json]", request["messages"])]}

    def _restored(self, message: Json) -> Json:
        message = canonical_message(message)
        if isinstance(thinking := message.get("reasoning_content"), str):
            message = message | {"reasoning_content": self._thinking.get(thinking.strip(), thinking)}
        if (call := self._calls.get(str(message.get("tool_call_id")))) is not None:
            return message | {"tool_call_id": call["id"]}
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            return message
        return message | {"tool_calls": [self._calls.get(call.get("id"), call) for call in calls]}


def canonical_message(message: Json) -> Json:
    """Return a message's canonical form: a single text part becomes a string, the role developer becomes system."""
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and content[0].get("type") == "text":
        message = message | {"content": content[0]["text"]}
    return message | {"role": "system"} if message["role"] == "developer" else message


class OpenAIDialect:
    """What OpenAI's two dialects share."""

    ping = b": waiting\n\n"

    def error(self, message: str) -> Json:
        """Return an error body in OpenAI's format."""
        return {"error": {"message": message, "type": "invalid_request_error"}}


class ChatCompletions(OpenAIDialect):
    """Dialect of `/v1/chat/completions`."""

    def to_chat(self, body: Json) -> Json:
        """Return the request unchanged."""
        if body.get("n") not in (None, 1):
            raise ValueError("n must be 1: the model gives one answer to a request")
        return body

    def answer(self, completion: WireCompletion, body: Json) -> Json:
        """Return the completion unchanged."""
        del body
        return cast("Json", completion)

    def events(self, answer: Json, body: Json) -> list[bytes]:
        """Return one chunk for the text, one per tool call, one for the end, and the usage if requested."""
        completion = cast("WireCompletion", answer)
        (choice,) = completion["choices"]
        message = choice["message"]
        head = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

        def chunk(delta: Json, finish: str | None = None) -> bytes:
            return event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        text: Json = {key: value for key, value in message.items() if key != "tool_calls" and value is not None}
        calls = [call | {"index": number} for number, call in enumerate(message.get("tool_calls") or [])]
        chunks = [chunk({"role": "assistant", "content": None} | text)]
        chunks += [chunk({"tool_calls": [call]}) for call in calls]
        chunks.append(chunk({}, choice["finish_reason"] or "stop"))
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            chunks.append(event(head | {"choices": [], "usage": completion.get("usage")}))
        return [*chunks, b"data: [DONE]\n\n"]

    def error_event(self, message: str) -> bytes:
        """Return the error as a stream event; clients raise on a chunk with `error`."""
        return event(self.error(message))
