"""Model proxy of one trial: a small server between an agent in its sandbox and verifiers' endpoint.

It accepts the APIs in `ROUTES`, each also streamed, and requests plain chat completions from the endpoint, which
captures the tokens as for any other agent. It listens on the host. In a sandbox with its own network it also listens
on a socket made inside, at the same address.

Invariants:

- Requests are served only with the trial's own key, only while the agent runs, and only on the routes.
- The endpoint's key never reaches an agent. The agent's key never reaches the model's messages.
- An answer is complete before its first byte is sent, also when streamed, so the captured tokens are what the agent
  reads. A waiting stream is kept alive with pings.
- A trial holds at most `MAX_REQUESTS` bodies and `MAX_CONNECTIONS` connections. Further requests wait unread, in order:
  agents that run sub-agents in parallel send more, and most give up after a few refusals.
"""

import asyncio
import hmac
import io
import json
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import aiohttp
from aiohttp import web
from pydantic import SecretStr

from harbortrainer.environment.model_proxy.agent_request import (
    AgentRequest,
    RefusedError,
    parse,
    read_body,
    run_in_translator,
)
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
MAX_REQUESTS = 4
"""Most requests of a trial in flight."""
MAX_CONNECTIONS = 64
"""Most open connections of a trial; further ones are closed at once."""
GRACE_S, PING_S = 30.0, 10.0
_IDLE_S, _UNREAD_BYTES = 75.0, 1 << 16
_RETRY_MARK = "x-stainless-retry-count"
_MAX_REFUSALS = 5
_NOT_RUNNING = "the agent of this trial is not running"

logger = logging.getLogger(__name__)


class ProxyRoutes:
    """Request handlers of the proxy.

    Args:
        upstream: HTTP session for the endpoint.
        endpoint: Base URL of verifiers' endpoint, which ends in /v1.
        secret: Bearer token of the endpoint.
        key: Key that the agent must send.
        trial: Name of the trial, for messages.
    """

    def __init__(self, upstream: aiohttp.ClientSession, endpoint: str, secret: str, key: str, trial: str) -> None:
        self._upstream, self._key, self._trial = upstream, key, trial
        self._url = f"{endpoint.rstrip('/')}/chat/completions"
        self._headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        self._history = MessageNormalizer()
        self._has_warned = False
        self.places: asyncio.Semaphore | None = None
        """Places for requests in flight; None if no requests are answered now."""
        self.refused: list[str] = []
        """Descriptions of the first refused requests."""

    def application(self) -> web.Application:
        """Return the web application."""
        app = web.Application()
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
            if (places := self.places) is not None:
                async with places:
                    if places is self.places:
                        return await self._answer(request, dialect, places)
            return self._refuse(request, dialect, HTTPStatus.FORBIDDEN, _NOT_RUNNING)

        return handle

    async def _answer(self, request: web.Request, dialect: Dialect, places: asyncio.Semaphore) -> web.StreamResponse:
        """Answer a request, unless the agent's time ends before it has arrived whole."""
        try:
            parsed = await self._parse(request, dialect)
        except RefusedError as error:
            return self._refuse(request, dialect, error.status, str(error))
        if places is not self.places:
            return self._refuse(request, dialect, HTTPStatus.FORBIDDEN, _NOT_RUNNING)
        self._warn_of(parsed.ignored)
        answer = asyncio.ensure_future(self._complete(parsed, request.headers.get(_RETRY_MARK)))
        return await (_streamed if parsed.settings.get("stream") else _whole)(request, dialect, parsed, answer)

    async def _parse(self, request: web.Request, dialect: Dialect) -> AgentRequest:
        raw = await read_body(request)
        return await run_in_translator(lambda: parse(raw, self._key, dialect, self._history))

    def _warn_of(self, ignored: list[str]) -> None:
        """Warn once per trial of sampling parameters that the run's replace."""
        if ignored and not self._has_warned:
            self._has_warned = True
            logger.warning("%s: the run's sampling replaces the agent's %s", self._trial, ", ".join(ignored))

    async def _not_found(self, request: web.Request) -> web.Response:
        status = HTTPStatus.NOT_FOUND if self._is_known(request) else HTTPStatus.UNAUTHORIZED
        return self._refuse(request, next(iter(ROUTES.values())), status, "the model proxy does not serve this path")

    def _is_known(self, request: web.Request) -> bool:
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        return hmac.compare_digest(sent.encode(errors="surrogateescape"), self._key.encode())

    def _refuse(self, request: web.Request, dialect: Dialect, status: int, reason: str) -> web.Response:
        if len(self.refused) < _MAX_REFUSALS:
            self.refused.append(f"{request.method} {request.path[:80]} was refused ({status}): {reason[:200]}")
        return web.json_response(dialect.error(reason), status=status)

    async def _complete(self, parsed: AgentRequest, retry: str | None) -> WireCompletion:
        """Request one completion from the endpoint. Raises `RefusedError`."""
        headers = self._headers | ({_RETRY_MARK: retry} if retry else {})
        try:
            # From a file, aiohttp sends a large body in pieces.
            async with self._upstream.post(self._url, data=io.BytesIO(parsed.chat), headers=headers) as response:
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
    request: web.Request, dialect: Dialect, parsed: AgentRequest, answer: asyncio.Future[WireCompletion]
) -> web.StreamResponse:
    del request
    try:
        completion = await answer
    except RefusedError as error:
        return web.json_response(dialect.error(str(error)), status=error.status)
    text = await run_in_translator(lambda: json.dumps(dialect.answer(completion, parsed.settings)))
    return web.json_response(text=text)


async def _streamed(
    request: web.Request, dialect: Dialect, parsed: AgentRequest, answer: asyncio.Future[WireCompletion]
) -> web.StreamResponse:
    """Send the answer as events. An error within the grace period keeps its HTTP status, so the agent can retry."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await asyncio.wait({answer}, timeout=GRACE_S)
    if answer.done() and answer.exception() is not None:
        return await _whole(request, dialect, parsed, answer)
    try:
        await stream.prepare(request)
        while not answer.done():
            await stream.write(dialect.ping)
            await asyncio.wait({answer}, timeout=PING_S)
        for event in await run_in_translator(lambda: _events(dialect, parsed.settings, answer)):
            await stream.write(event)
        await stream.write_eof()
    except ConnectionResetError:
        pass  # the agent has disconnected; the sampled tokens are on the trace
    return stream


def translate_example() -> None:
    """Translate an example request and its answer in each dialect: LiteLLM imports modules at the first one."""
    body: Json = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "input": "Hi"}
    completion: WireCompletion = {
        "id": "1",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hello."}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
    for dialect in ROUTES.values():
        dialect.to_chat(body)
        dialect.events(dialect.answer(completion, body), body)


def _events(dialect: Dialect, settings: Json, answer: asyncio.Future[WireCompletion]) -> list[bytes]:
    try:
        return dialect.events(dialect.answer(answer.result(), settings), settings)
    except RefusedError as error:
        return [dialect.error_event(str(error))]


def _message_in(reply: object) -> str:
    error = reply.get("error") if isinstance(reply, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or reply)[:2000]


_BACKLOG = 16  # the event loop accepts this many connections before it counts them


@runtime_checkable
class ListensInside(Protocol):
    """An environment on this machine whose sandbox can have its own network."""

    async def listen_inside(self, port: int) -> socket.socket | None:
        """Return a socket that listens on the sandbox's loopback `port`; None if the sandbox shares the host's."""
        ...


class _Full(asyncio.Protocol):
    """Closes its connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class ModelProxy:
    """The model proxy of one trial; an asynchronous context manager.

    Args:
        endpoint: Base URL of verifiers' endpoint, which ends in /v1.
        secret: Bearer token of the endpoint.
        host: Address of this machine that the agent's sandbox can reach.
        name: Host name of that address inside the sandbox.
        trial: Name of the trial, for messages.
    """

    def __init__(self, endpoint: str, secret: str, *, host: str, name: str, trial: str) -> None:
        self.key = SecretStr(secrets.token_urlsafe(24))
        """Key that the agent must send."""
        self._endpoint, self._secret, self._host, self._name, self._trial = endpoint, secret, host, name, trial
        self._runner: web.AppRunner | None = None
        self._listeners: list[asyncio.Server] = []
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
        key = self.key.get_secret_value()
        self._routes = ProxyRoutes(self._upstream, self._endpoint, self._secret, key, self._trial)
        self._runner = web.AppRunner(
            self._routes.application(),
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=_IDLE_S,
            read_bufsize=_UNREAD_BYTES,
        )
        await self._runner.setup()
        await self._listen(listening)
        return self

    async def _listen(self, listening: socket.socket) -> None:
        """Accept connections until there are `MAX_CONNECTIONS`."""
        server = self._runner.server if self._runner is not None else None
        assert server is not None

        def protocol() -> asyncio.Protocol:
            return server() if len(server.connections) < MAX_CONNECTIONS else _Full()

        loop = asyncio.get_running_loop()
        self._listeners.append(await loop.create_server(protocol, sock=listening, backlog=_BACKLOG))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in self._listeners:
            listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
            await self._upstream.close()

    async def start_serving(self, environment: object) -> None:
        """Answer the agent's requests from now on, also from inside its sandbox."""
        self._routes.places = asyncio.Semaphore(MAX_REQUESTS)
        if self._inside is not environment and isinstance(environment, ListensInside):
            self._inside = environment
            if (listening := await environment.listen_inside(self._port)) is not None:
                await self._listen(listening)

    def stop_serving(self) -> None:
        """Refuse all requests from now on, including requests of the agent's leftover processes."""
        self._routes.places = None

    @property
    def refusals(self) -> str:
        """Description of the refused requests, "" if there are none."""
        return "; ".join(self._routes.refused)
