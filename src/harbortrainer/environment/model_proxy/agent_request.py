"""Bounds, parsing and translation of one request that an agent sends to the model proxy.

A body comes from model output and may be hostile. Only its reading runs on the event loop, in pieces. Everything whose
duration depends on its size runs in `run_in_translator`, one body of the process at a time.

Invariants:

- A body over a bound is refused before it is parsed: the parser holds the interpreter's lock while it runs.
- What an `AgentRequest` keeps while the model answers is the translated request, and the body without its history.
- The endpoint gets the keys in `TRANSLATED` only: the run's sampling applies to every agent.
"""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from harbortrainer.environment.model_proxy.dialect import TRANSLATED, Dialect, Json, MessageNormalizer

MAX_BYTES = 16 << 20
"""Largest body, uncompressed."""
MAX_OBJECTS = 20_000
"""Most JSON objects in a body. A turn of an agent has about four; the descriptions of its tools have some more."""
MAX_SEPARATORS = 1_000_000
"""Most commas and opening brackets in a body, also within its strings: megabytes of the densest JSON or CSV."""
READ_S = 60.0
"""Seconds in which a body must arrive."""

_HISTORY = ("messages", "system", "input", "instructions")
_HIDDEN = b"[REDACTED]"
_SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "n", "best_of", "seed", "logit_bias", "bad_words"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "stop", "stop_sequences", "stop_token_ids"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "logprobs", "top_logprobs"),
    *("response_format", "structured_outputs", "guided_json", "text", "extra_body"),
    *("thinking", "reasoning", "reasoning_effort", "chat_template_kwargs"),
}
_translator = ThreadPoolExecutor(1, thread_name_prefix="model-proxy")


class RefusedError(Exception):
    """A request that gets no completion, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class AgentRequest:
    """A parsed request."""

    chat: bytes
    """The chat completion request for the endpoint, as JSON."""
    settings: Json
    """The body without its history."""

    @property
    def ignored(self) -> list[str]:
        """Names of the sampling parameters that the agent sent; the endpoint does not get them."""
        return sorted(self.settings.keys() & _SAMPLING)


async def run_in_translator[T](work: Callable[[], T]) -> T:
    """Run `work` in the process's one thread for bodies, in order of arrival."""
    return await asyncio.get_running_loop().run_in_executor(_translator, work)


async def read_body(request: web.Request) -> bytes:
    """Read a body, uncompressed. Raises `RefusedError` if it is too large or too slow, or does not arrive whole."""
    body = bytearray()
    try:
        async with asyncio.timeout(READ_S):
            if (request.content_length or 0) > MAX_BYTES:
                raise _too_large("bytes", MAX_BYTES)
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise _too_large("bytes", MAX_BYTES)
    except TimeoutError:
        raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {READ_S:.0f} s") from None
    except (ConnectionError, web.RequestPayloadError) as error:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"the body did not arrive whole: {error}") from error
    return bytes(body)


def parse(raw: bytes, key: str, dialect: Dialect, history: MessageNormalizer) -> AgentRequest:
    """Parse and translate a body.

    Args:
        raw: The body.
        key: The agent's key, which is removed from the messages.
        dialect: The API of the request.
        history: The trial's messages.

    Raises:
        RefusedError: The body is over a bound, or cannot be read.
    """
    if sum(raw.count(sign) for sign in (b"{", b"[", b",")) > MAX_SEPARATORS:
        raise _too_large("commas and brackets", MAX_SEPARATORS)
    try:
        body = json.loads(raw.replace(key.encode(), _HIDDEN), object_hook=_ObjectCounter())
        chat = history.to_endpoint(dialect.to_chat(body))
        allowed = {name: chat[name] for name in TRANSLATED if chat.get(name) is not None}
        return AgentRequest(
            json.dumps(allowed).encode(), {name: value for name, value in body.items() if name not in _HISTORY}
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"this request cannot be read: {type(error).__name__}: {error}"
        raise RefusedError(HTTPStatus.BAD_REQUEST, reason) from error


class _ObjectCounter:
    """Counts the objects of a body while it is parsed."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, parsed: Json) -> Json:
        self._count += 1
        if self._count > MAX_OBJECTS:
            raise _too_large("JSON objects", MAX_OBJECTS)
        return parsed


def _too_large(what: str, most: int) -> RefusedError:
    return RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the request has more than {most} {what}")
