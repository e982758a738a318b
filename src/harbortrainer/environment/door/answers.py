"""What the door says to a request: who is refused, what the endpoint is asked, how its answer goes back.

An answer is complete before the first byte of it is sent, also of a stream: what is captured and what the agent reads
are one thing. A stream that has to wait long for it is kept alive.
"""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import aiohttp
from aiohttp import web

from harbortrainer.environment.door.anthropic_messages import AnthropicMessages
from harbortrainer.environment.door.chat_completions import ChatCompletions
from harbortrainer.environment.door.openai_responses import OpenAIResponses
from harbortrainer.environment.door.spoken_dialect import Json, Spoken, WireCompletion
from harbortrainer.environment.door.told_history import ToldHistory

ROUTES: dict[str, Spoken] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/messages": AnthropicMessages(),
    "/v1/responses": OpenAIResponses(),
}
"""What is served, and in what it is spoken."""
MOST_BYTES = 1 << 28
GRACE_S, PING_S = 30.0, 10.0
_RETRY_MARK = "x-stainless-retry-count"
_MOST_REFUSALS = 5
_HIDDEN = b"[REDACTED]"


class RefusedError(Exception):
    """The endpoint did not answer with a completion."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Counter:
    """Where the agent's requests are taken.

    Args:
        upstream: Asks the endpoint.
        endpoint: verifiers', which ends in /v1.
        secret: Its bearer token.
        key: What the agent has to show.
    """

    def __init__(self, upstream: aiohttp.ClientSession, endpoint: str, secret: str, key: str) -> None:
        self._upstream, self._key = upstream, key
        self._url = f"{endpoint.rstrip('/')}/chat/completions"
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._history = ToldHistory()
        self.serves = False
        """Whether an agent may ask now."""
        self.refused: list[str] = []
        """The first requests that were refused, in words."""

    def application(self) -> web.Application:
        """What the door's server runs."""
        app = web.Application(client_max_size=MOST_BYTES)
        for path, spoken in ROUTES.items():
            app.router.add_post(path, self._handler(spoken))
        app.router.add_route("*", "/{path:.*}", self._elsewhere)
        return app

    def _handler(self, spoken: Spoken) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            if not self._is_known(request):
                return self._refuse(request, spoken, HTTPStatus.UNAUTHORIZED, "the key is not this trial's")
            if not self.serves:
                return self._refuse(request, spoken, HTTPStatus.FORBIDDEN, "no agent is at work in this trial")
            raw = (await request.read()).replace(self._key.encode(), _HIDDEN)
            try:
                body = json.loads(raw)
                asked = self._history.returned(spoken.to_chat(body))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                why = f"this is no request: {type(error).__name__}: {error}"
                return self._refuse(request, spoken, HTTPStatus.BAD_REQUEST, why)
            answer = asyncio.ensure_future(self._ask(asked, request.headers.get(_RETRY_MARK)))
            return await (_streamed if body.get("stream") else _whole)(request, spoken, body, answer)

        return handle

    async def _elsewhere(self, request: web.Request) -> web.Response:
        status = HTTPStatus.NOT_FOUND if self._is_known(request) else HTTPStatus.UNAUTHORIZED
        return self._refuse(request, next(iter(ROUTES.values())), status, "this is not served here")

    def _is_known(self, request: web.Request) -> bool:
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        return hmac.compare_digest(shown.encode(), self._key.encode())

    def _refuse(self, request: web.Request, spoken: Spoken, status: HTTPStatus, why: str) -> web.Response:
        if len(self.refused) < _MOST_REFUSALS:
            self.refused.append(f"{request.method} {request.path[:80]} was refused ({status}): {why[:200]}")
        return web.json_response(spoken.error(why), status=status)

    async def _ask(self, asked: Json, retry: str | None) -> WireCompletion:
        """One completion of the endpoint's. Raises `RefusedError`."""
        headers = self._headers | ({_RETRY_MARK: retry} if retry else {})
        try:
            async with self._upstream.post(self._url, json=asked, headers=headers) as response:
                said = await response.read()
        except aiohttp.ClientError as error:
            raise RefusedError(HTTPStatus.BAD_GATEWAY, f"the endpoint cannot be reached: {error}") from error
        try:
            reply = json.loads(said)
        except ValueError as error:
            raise RefusedError(HTTPStatus.BAD_GATEWAY, f"no JSON: {said[:200]!r}") from error
        if response.status != HTTPStatus.OK:
            raise RefusedError(response.status, _message_in(reply))
        return self._history.given(reply)


async def _whole(
    request: web.Request, spoken: Spoken, body: Json, answer: asyncio.Future[WireCompletion]
) -> web.StreamResponse:
    del request
    try:
        return web.json_response(spoken.answer(await answer, body))
    except RefusedError as error:
        return web.json_response(spoken.error(str(error)), status=error.status)


async def _streamed(
    request: web.Request, spoken: Spoken, body: Json, answer: asyncio.Future[WireCompletion]
) -> web.StreamResponse:
    """The answer as events. Within the grace period a refusal keeps its status, so that the agent can try again."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await asyncio.wait({answer}, timeout=GRACE_S)
    if answer.done() and answer.exception() is not None:
        return await _whole(request, spoken, body, answer)
    try:
        await stream.prepare(request)
        while not answer.done():
            await stream.write(spoken.ping)
            await asyncio.wait({answer}, timeout=PING_S)
        for event in _events(spoken, body, answer):
            await stream.write(event)
        await stream.write_eof()
    except ConnectionResetError:
        pass  # the agent is gone; what was sampled is on the trace
    return stream


def _events(spoken: Spoken, body: Json, answer: asyncio.Future[WireCompletion]) -> list[bytes]:
    try:
        return spoken.events(spoken.answer(answer.result(), body), body)
    except RefusedError as error:
        return [spoken.error_event(str(error))]


def _message_in(reply: object) -> str:
    error = reply.get("error") if isinstance(reply, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or reply)[:2000]
