"""Model proxy of one trial: a small server between an agent in its sandbox and verifiers' endpoint.

It accepts the APIs in `ROUTES`, each also streamed, and requests plain chat completions from the endpoint, which
captures the tokens as for any other agent. It listens on the host. In a sandbox with its own network it also listens
on a socket made inside, at the same address.

Invariants:

- Requests are served only with the trial's own key, only while the agent runs, and only on the routes.
- The endpoint's key never reaches an agent. The agent's key never reaches the model's messages.
- An answer is complete before its first byte is sent, also when streamed, so the captured tokens are what the agent
  reads. A waiting stream is kept alive with pings.
"""

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import aiohttp
from aiohttp import web
from pydantic import SecretStr

from harbortrainer.environment.model_proxy.anthropic_messages import AnthropicMessages
from harbortrainer.environment.model_proxy.dialect import (
    ChatCompletions,
    Dialect,
    Json,
    MessageNormalizer,
    WireCompletion,
)
from harbortrainer.environment.model_proxy.openai_responses import OpenAIResponses

ROUTES: dict[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/messages": AnthropicMessages(),
    "/v1/responses": OpenAIResponses(),
}
"""Dialect by path; nothing else is served."""
MOST_BYTES = 1 << 28
GRACE_S, PING_S = 30.0, 10.0
_RETRY_MARK = "x-stainless-retry-count"
_MAX_REFUSALS = 5
_HIDDEN = b"[REDACTED]"


class RefusedError(Exception):
    """The endpoint did not answer with a completion."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ProxyRoutes:
    """Request handlers of the proxy.

    Args:
        upstream: HTTP session for the endpoint.
        endpoint: Base URL of verifiers' endpoint, which ends in /v1.
        secret: Bearer token of the endpoint.
        key: Key that the agent must send.
    """

    def __init__(self, upstream: aiohttp.ClientSession, endpoint: str, secret: str, key: str) -> None:
        self._upstream, self._key = upstream, key
        self._url = f"{endpoint.rstrip('/')}/chat/completions"
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._history = MessageNormalizer()
        self.serving = False
        """Whether requests are answered now."""
        self.refused: list[str] = []
        """Descriptions of the first refused requests."""

    def application(self) -> web.Application:
        """Return the web application."""
        app = web.Application(client_max_size=MOST_BYTES)
        for path, dialect in ROUTES.items():
            app.router.add_post(path, self._handler(dialect))
        app.router.add_route("*", "/{path:.*}", self._not_found)
        return app

    def _handler(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            if not self._is_known(request):
                return self._refuse(
                    request,
                    dialect,
                    HTTPStatus.UNAUTHORIZED,
                    "wrong or missing API key of this trial",
                )
            if not self.serving:
                return self._refuse(request, dialect, HTTPStatus.FORBIDDEN, "the agent of this trial is not running")
            raw = (await request.read()).replace(self._key.encode(), _HIDDEN)
            try:
                body = json.loads(raw)
                chat_request = self._history.to_endpoint(dialect.to_chat(body))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                reason = f"this request cannot be read: {type(error).__name__}: {error}"
                return self._refuse(request, dialect, HTTPStatus.BAD_REQUEST, reason)
            answer = asyncio.ensure_future(self._complete(chat_request, request.headers.get(_RETRY_MARK)))
            return await (_streamed if body.get("stream") else _whole)(request, dialect, body, answer)

        return handle

    async def _not_found(self, request: web.Request) -> web.Response:
        status = HTTPStatus.NOT_FOUND if self._is_known(request) else HTTPStatus.UNAUTHORIZED
        return self._refuse(request, next(iter(ROUTES.values())), status, "the model proxy does not serve this path")

    def _is_known(self, request: web.Request) -> bool:
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        return hmac.compare_digest(sent.encode(), self._key.encode())

    def _refuse(self, request: web.Request, dialect: Dialect, status: HTTPStatus, reason: str) -> web.Response:
        if len(self.refused) < _MAX_REFUSALS:
            self.refused.append(f"{request.method} {request.path[:80]} was refused ({status}): {reason[:200]}")
        return web.json_response(dialect.error(reason), status=status)

    async def _complete(self, chat_request: Json, retry: str | None) -> WireCompletion:
        """Request one completion from the endpoint. Raises `RefusedError`."""
        headers = self._headers | ({_RETRY_MARK: retry} if retry else {})
        try:
            async with self._upstream.post(self._url, json=chat_request, headers=headers) as response:
                content = await response.read()
        except aiohttp.ClientError as error:
            raise RefusedError(HTTPStatus.BAD_GATEWAY, f"the model endpoint cannot be reached: {error}") from error
        try:
            reply = json.loads(content)
        except ValueError as error:
            raise RefusedError(HTTPStatus.BAD_GATEWAY, f"the model endpoint sent no JSON: {content[:200]!r}") from error
        if response.status != HTTPStatus.OK:
            raise RefusedError(response.status, _message_in(reply))
        return self._history.to_agent(reply)


async def _whole(
    request: web.Request, dialect: Dialect, body: Json, answer: asyncio.Future[WireCompletion]
) -> web.StreamResponse:
    del request
    try:
        return web.json_response(dialect.answer(await answer, body))
    except RefusedError as error:
        return web.json_response(dialect.error(str(error)), status=error.status)


async def _streamed(
    request: web.Request, dialect: Dialect, body: Json, answer: asyncio.Future[WireCompletion]
) -> web.StreamResponse:
    """Send the answer as events. An error within the grace period keeps its HTTP status, so the agent can retry."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await asyncio.wait({answer}, timeout=GRACE_S)
    if answer.done() and answer.exception() is not None:
        return await _whole(request, dialect, body, answer)
    try:
        await stream.prepare(request)
        while not answer.done():
            await stream.write(dialect.ping)
            await asyncio.wait({answer}, timeout=PING_S)
        for event in _events(dialect, body, answer):
            await stream.write(event)
        await stream.write_eof()
    except ConnectionResetError:
        pass  # the agent has disconnected; the sampled tokens are on the trace
    return stream


def _events(dialect: Dialect, body: Json, answer: asyncio.Future[WireCompletion]) -> list[bytes]:
    try:
        return dialect.events(dialect.answer(answer.result(), body), body)
    except RefusedError as error:
        return [dialect.error_event(str(error))]


def _message_in(reply: object) -> str:
    error = reply.get("error") if isinstance(reply, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or reply)[:2000]


_BACKLOG = 128


@runtime_checkable
class ListensInside(Protocol):
    """An environment on this machine whose sandbox can have its own network."""

    async def listen_inside(self, port: int) -> socket.socket | None:
        """Return a socket that listens on the sandbox's loopback `port`; None if the sandbox shares the host's."""
        ...


class ModelProxy:
    """The model proxy of one trial; an asynchronous context manager.

    Args:
        endpoint: Base URL of verifiers' endpoint, which ends in /v1.
        secret: Bearer token of the endpoint.
        host: Address of this machine that the agent's sandbox can reach.
        name: Host name of that address inside the sandbox.
    """

    def __init__(self, endpoint: str, secret: str, *, host: str, name: str) -> None:
        self.key = SecretStr(secrets.token_urlsafe(24))
        """Key that the agent must send."""
        self._endpoint, self._secret, self._host, self._name = endpoint, secret, host, name
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._inside: object = None

    @property
    def url(self) -> str:
        """Base URL for the agent, inside the sandbox and on the host; ends in /v1."""
        return f"http://{self._name}:{self._port}/v1"

    async def __aenter__(self) -> Self:
        listening = socket.create_server((self._host, 0), backlog=_BACKLOG)
        self._port = listening.getsockname()[1]
        self._upstream = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self._routes = ProxyRoutes(self._upstream, self._endpoint, self._secret, self.key.get_secret_value())
        self._runner = web.AppRunner(self._routes.application(), access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            await self._upstream.close()

    async def start_serving(self, environment: object) -> None:
        """Answer the agent's requests from now on, also from inside its sandbox."""
        assert self._runner is not None
        self._routes.serving = True
        if self._inside is not environment and isinstance(environment, ListensInside):
            self._inside = environment
            if (listening := await environment.listen_inside(self._port)) is not None:
                await web.SockSite(self._runner, listening).start()

    def stop_serving(self) -> None:
        """Refuse all requests from now on, including requests of the agent's leftover processes."""
        self._routes.serving = False

    @property
    def refusals(self) -> str:
        """Description of the refused requests, "" if there are none."""
        return "; ".join(self._routes.refused)
