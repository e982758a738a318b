"""OpenAI's chat completions at the door: what the endpoint speaks itself, but for streams."""

from typing import cast

from harbortrainer.environment.door.spoken_dialect import Json, WireCompletion, event

_OF_STREAMS = ("stream", "stream_options")


class ChatCompletions:
    """`/v1/chat/completions`."""

    ping = b": waiting\n\n"

    def to_chat(self, body: Json) -> Json:
        """The request itself."""
        return {key: value for key, value in body.items() if key not in _OF_STREAMS}

    def answer(self, completion: WireCompletion, body: Json) -> Json:
        """The completion itself."""
        del body
        return cast("Json", completion)

    def events(self, answer: Json, body: Json) -> list[bytes]:
        """A piece for the text, one for each tool call, one for the end, and the usage where it was asked for."""
        completion = cast("WireCompletion", answer)
        (choice,) = completion["choices"]
        said = choice["message"]
        head = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

        def piece(delta: Json, finish: str | None = None) -> bytes:
            return event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        text: Json = {key: value for key, value in said.items() if key != "tool_calls" and value is not None}
        calls = [call | {"index": number} for number, call in enumerate(said.get("tool_calls") or [])]
        pieces = [piece({"role": "assistant", "content": None} | text)]
        pieces += [piece({"tool_calls": [call]}) for call in calls]
        pieces.append(piece({}, choice["finish_reason"] or "stop"))
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            pieces.append(event(head | {"choices": [], "usage": completion.get("usage")}))
        return [*pieces, b"data: [DONE]\n\n"]

    def error(self, message: str) -> Json:
        """As OpenAI's."""
        return {"error": {"message": message, "type": "invalid_request_error"}}

    def error_event(self, message: str) -> bytes:
        """Clients raise what has an `error`."""
        return event(self.error(message))
