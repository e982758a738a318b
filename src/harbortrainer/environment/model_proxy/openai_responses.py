"""OpenAI's Responses API for the model proxy, translated by LiteLLM's adapter.

Nothing is stored between requests: each must contain its history, as agents with `store: false` send it. Such agents
send back only the encrypted reasoning, so answers contain the reasoning in that field too.
`PRIVATE_APIS` lists the private names; they are checked before use. Importing this module does not import LiteLLM.
"""

import base64
import copy
from functools import cache
from typing import TYPE_CHECKING, cast

from harbortrainer.environment.model_proxy.dialect import TRANSLATED, Json, OpenAIDialect, WireCompletion, event
from harbortrainer.harbor_compat import keep_litellm_offline
from harbortrainer.private_apis import PrivateApi

if TYPE_CHECKING:
    from litellm.responses.litellm_completion_transformation.transformation import LiteLLMCompletionResponsesConfig

_ADAPTER = "litellm.responses.litellm_completion_transformation.transformation:LiteLLMCompletionResponsesConfig."
PRIVATE_APIS = PrivateApi(
    library="litellm",
    written_for="1.106",
    used_by="harbortrainer.environment.model_proxy.openai_responses",
    places=(
        f"{_ADAPTER}transform_responses_api_request_to_chat_completion_request"
        "(model, input, responses_api_request, ...)",
        f"{_ADAPTER}transform_chat_completion_response_to_responses_api_response"
        "(request_input, responses_api_request, chat_completion_response)",
    ),
)


_DETAILS = {
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 0},
}
"""Usage details that clients of OpenAI's service require; the endpoint rarely reports them."""


@cache
def adapter() -> "type[LiteLLMCompletionResponsesConfig]":
    """Return LiteLLM's translation class."""
    keep_litellm_offline()
    PRIVATE_APIS.check()
    from litellm.responses.litellm_completion_transformation.transformation import LiteLLMCompletionResponsesConfig

    return LiteLLMCompletionResponsesConfig


class OpenAIResponses(OpenAIDialect):
    """Dialect of `/v1/responses`."""

    def to_chat(self, body: Json) -> Json:
        """Translate instructions, input and function tools; drop OpenAI's built-in tools."""
        if body.get("previous_response_id"):
            raise ValueError("previous_response_id is not supported: nothing is stored here; send the whole input")
        request = copy.deepcopy(body)
        if isinstance(request["input"], list):
            request["input"] = [_with_plain_reasoning(item) for item in request["input"]]
        tools = cast("list[Json]", request.get("tools") or [])
        request["tools"] = [tool for tool in tools if tool.get("type") == "function"]
        translate = adapter().transform_responses_api_request_to_chat_completion_request
        translated = translate(
            model="policy",
            custom_llm_provider="hosted_vllm",  # a provider that LiteLLM does not look up
            input=request.pop("input"),  # ty: ignore[invalid-argument-type] - unchanged from the agent
            responses_api_request=request,  # ty: ignore[invalid-argument-type]
        )
        return {key: translated[key] for key in TRANSLATED if translated.get(key)}

    def answer(self, completion: WireCompletion, body: Json) -> Json:
        """Return a response with reasoning, message and function call items."""
        from litellm import ModelResponse

        response = adapter().transform_chat_completion_response_to_responses_api_response(
            request_input="",
            responses_api_request=copy.deepcopy(body),  # ty: ignore[invalid-argument-type]
            chat_completion_response=ModelResponse(**completion),
        )
        # LiteLLM's models do not define all fields of reasoning items, and would warn.
        dumped = response.model_dump(mode="json", exclude_none=True, warnings=False)
        thinking = completion["choices"][0]["message"].get("reasoning_content") or ""
        output = dumped["output"]
        dumped["output"] = [_reasoning(item, thinking) if item["type"] == "reasoning" else item for item in output]
        dumped["usage"] |= {name: zeros | dumped["usage"].get(name, {}) for name, zeros in _DETAILS.items()}
        return dumped | {"model": body.get("model")}

    def events(self, answer: Json, body: Json) -> list[bytes]:
        """Return the events: start, each item with its text in one piece, and the whole response at the end."""
        del body
        begun = answer | {"status": "in_progress", "output": []}
        events: list[Json] = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
        for number, item in enumerate(cast("list[Json]", answer["output"])):
            events += [data | {"output_index": number} for data in _item_events(item)]
        last = "incomplete" if answer.get("status") == "incomplete" else "completed"
        events.append({"type": f"response.{last}", "response": answer})
        return [event(data | {"sequence_number": n}, str(data["type"])) for n, data in enumerate(events)]

    def error_event(self, message: str) -> bytes:
        """Return the error as a stream event; clients stop on it."""
        return event({"type": "error", "message": message}, "error")


def _reasoning(item: Json, text: str) -> Json:
    """Return a reasoning item in OpenAI's format; LiteLLM formats it as a message."""
    return {
        "type": "reasoning",
        "id": item["id"],
        "status": item["status"],
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": base64.b64encode(text.encode()).decode(),
    }


def _with_plain_reasoning(item: Json) -> Json:
    """Return a history item, with its reasoning decoded if the agent sent only the encrypted field."""
    if item.get("type") != "reasoning" or item.get("content") or not item.get("encrypted_content"):
        return item
    text = base64.b64decode(str(item["encrypted_content"]), validate=True).decode()
    return item | {"content": [{"type": "reasoning_text", "text": text}]}


def _item_events(item: Json) -> list[Json]:
    """Return the events of one item: added, content, done."""
    parts: list[Json] = []
    empty = item | {"status": "in_progress"}
    if item["type"] == "message":
        empty |= {"content": []}
        for number, part in enumerate(cast("list[Json]", item["content"])):
            where: Json = {"item_id": item["id"], "content_index": number}
            parts += [
                {"type": "response.content_part.added", "part": part | {"text": ""}} | where,
                {"type": "response.output_text.delta", "delta": part["text"], "logprobs": []} | where,
                {"type": "response.output_text.done", "text": part["text"], "logprobs": []} | where,
                {"type": "response.content_part.done", "part": part} | where,
            ]
    elif item["type"] == "function_call":
        empty |= {"arguments": ""}
        of: Json = {"item_id": item["id"]}
        done: Json = {"name": item["name"], "arguments": item["arguments"]}
        parts = [
            {"type": "response.function_call_arguments.delta", "delta": item["arguments"]} | of,
            {"type": "response.function_call_arguments.done"} | done | of,
        ]
    elif item["type"] == "reasoning":
        empty |= {"content": []}
        (part,) = cast("list[Json]", item["content"])
        of = {"item_id": item["id"], "content_index": 0}
        parts = [
            {"type": "response.reasoning_text.delta", "delta": part["text"]} | of,
            {"type": "response.reasoning_text.done", "text": part["text"]} | of,
        ]
    begun: Json = {"type": "response.output_item.added", "item": empty}
    return [begun, *parts, {"type": "response.output_item.done", "item": item}]
