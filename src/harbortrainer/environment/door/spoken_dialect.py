"""What agents speak at the door: how a request becomes one for a chat completion, and the completion an answer."""

import json
from collections.abc import Mapping
from typing import NotRequired, Protocol, TypedDict

type Json = dict[str, object]


TRANSLATED = ("messages", "tools", "tool_choice")
"""What goes on of a request that was translated: sampling is the run's."""


class CalledFunction(TypedDict):
    """`arguments` is JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCallSaid(TypedDict):
    """A tool call of an answer's."""

    id: str
    type: str
    function: CalledFunction


class SaidMessage(TypedDict, total=False):
    """The message of a completion."""

    role: str
    content: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCallSaid]


class CompletionChoice(TypedDict):
    """The one choice that there is."""

    index: int
    message: SaidMessage
    finish_reason: str | None


class WireCompletion(TypedDict):
    """A chat completion, as the endpoint gives it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Json | None]


class Spoken(Protocol):
    """One dialect. What `to_chat` cannot read is a ValueError, TypeError, KeyError or AttributeError."""

    ping: bytes
    """What keeps a stream alive that has to wait."""

    def to_chat(self, body: Json) -> Json:
        """The request for a chat completion that a request means, without a stream."""
        ...

    def answer(self, completion: WireCompletion, body: Json) -> Json:
        """The answer that a completion is, to the request `body`."""
        ...

    def events(self, answer: Json, body: Json) -> list[bytes]:
        """The same answer as the events of a stream."""
        ...

    def error(self, message: str) -> Json:
        """What a refusal says."""
        ...

    def error_event(self, message: str) -> bytes:
        """The same in a stream that has begun."""
        ...


def event(data: Mapping[str, object], name: str = "") -> bytes:
    """One event of a stream."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(data).encode() + b"\n\n"
