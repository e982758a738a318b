"""Anthropic's Messages API for the model proxy, translated by LiteLLM's adapter.

`PRIVATE_APIS` lists the private names; they are checked before use. Importing this module does not import LiteLLM.
"""

import copy
import importlib
import json
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, cast

from harbortrainer.environment.model_proxy.dialect import TRANSLATED, Json, WireCompletion, event
from harbortrainer.harbor_compat import keep_litellm_offline
from harbortrainer.private_apis import PrivateApi

if TYPE_CHECKING:
    from litellm.llms.anthropic.pass_through.adapters.transformation import AnthropicAdapter

_RELEASE = tuple(map(int, version("litellm").split(".")[:2]))
_PACKAGE = "messages" if _RELEASE >= (1, 109) else "pass_through"
_MODULE = f"litellm.llms.anthropic.{_PACKAGE}.adapters.transformation"
_ADAPTER = f"{_MODULE}:AnthropicAdapter."
PRIVATE_APIS = PrivateApi(
    library="litellm",
    written_for="1.106",
    used_by="harbortrainer.environment.model_proxy.anthropic_messages",
    places=(
        f"{_ADAPTER}translate_completion_input_params_with_tool_mapping(kwargs, ...)",
        f"{_ADAPTER}translate_completion_output_params(response, tool_name_mapping, ...)",
    ),
)


_NO_HISTORY = [{"role": "user", "content": ""}]


@cache
def adapter() -> "AnthropicAdapter":
    """Return LiteLLM's adapter."""
    keep_litellm_offline()
    PRIVATE_APIS.check()
    return cast("AnthropicAdapter", importlib.import_module(_MODULE).AnthropicAdapter())


class AnthropicMessages:
    """Dialect of `/v1/messages`."""

    ping = event({"type": "ping"}, "ping")

    def to_chat(self, body: Json) -> Json:
        """Translate system prompt, messages and tools; drop Anthropic-only keys (thinking, caching, betas)."""
        request, _ = _translated(body)
        return {key: request[key] for key in TRANSLATED if request.get(key)}

    def answer(self, completion: WireCompletion, body: Json) -> Json:
        """Return a message with thinking, text and tool uses."""
        from litellm import ModelResponse

        _, names = _translated(body | {"messages": _NO_HISTORY})  # the names come from the tools
        translated = adapter().translate_completion_output_params(ModelResponse(**completion), tool_name_mapping=names)
        message = cast("Json", translated)
        # Only Anthropic's service signs thinking, but its clients require a string.
        blocks = [_signed(block) for block in cast("list[Json]", message["content"])]
        return message | {"content": blocks, "model": body.get("model")}

    def events(self, answer: Json, body: Json) -> list[bytes]:
        """Return the events: start, each block with its content in one piece, end."""
        del body
        blocks = cast("list[Json]", answer["content"])
        usage = cast("Json", answer["usage"])
        begun = answer | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
        ended = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
        return [
            _named("message_start", message=begun),
            *(piece for number, block in enumerate(blocks) for piece in _block(number, block)),
            _named("message_delta", delta=ended, usage=usage),
            _named("message_stop"),
        ]

    def error(self, message: str) -> Json:
        """Return an error body in Anthropic's format."""
        return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}

    def error_event(self, message: str) -> bytes:
        """Return the error as a stream event; the SDKs raise only on an event named `error`."""
        return event(self.error(message), "error")


def _translated(body: Json) -> tuple[Json, dict[str, str]]:
    """Return the chat completion request, and a mapping of tool names that were shortened."""
    named = copy.deepcopy(body) | {"model": "hosted_vllm/policy"}  # a provider that LiteLLM does not look up
    request, names = adapter().translate_completion_input_params_with_tool_mapping(named)
    return cast("Json", request), names


def _signed(block: Json) -> Json:
    return block | {"signature": block.get("signature") or ""} if block["type"] == "thinking" else block


def _named(kind: str, **data: object) -> bytes:
    return event({"type": kind, **data}, kind)


def _block(number: int, block: Json) -> list[bytes]:
    """Return the events of one block: start, content, stop."""
    match block["type"]:
        case "thinking":
            empty: Json = {"type": "thinking", "thinking": "", "signature": ""}
            deltas: list[Json] = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        case "tool_use":
            empty = block | {"input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        case _:
            empty = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": block["text"]}]
    return [
        _named("content_block_start", index=number, content_block=empty),
        *(_named("content_block_delta", index=number, delta=delta) for delta in deltas),
        _named("content_block_stop", index=number),
    ]
