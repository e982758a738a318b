"""CPU of a turn: what renderers, verifiers and pydantic spend on a training request, replaced where a few lines do it.

- `over_aiohttp`: renderers' `generate` posts to `/inference/v1/generate` with an OpenAI client. `GenerateClient` takes
  its place and posts with aiohttp, for a third of the CPU. A failed request raises what the OpenAI client would raise.
- `without_repeated_signatures`: pydantic's `model_construct`, which makes the nodes of a trace, inspects the signature
  of each default's factory every time.
- `without_repeated_headers`: renderers encodes the constant header of an assistant message for each answer it parses.
- `without_loopback_http`: an agent in this process calls verifiers' interception server, in this process too, over
  HTTP. `ChatClient` calls its handler instead.

Invariant: a request is sent once, as by verifiers' own client, and with its time limits. docs/benchmarks.md has the
figures, and the patches for the libraries.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial, wraps
from typing import TYPE_CHECKING, Protocol, cast

import aiohttp
import httpx
from aiohttp import web
from multidict import CIMultiDict
from openai import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    UnprocessableEntityError,
)
from pydantic_core import to_json

from harbortrainer.trials.local_endpoints import ENDPOINTS

if TYPE_CHECKING:
    from verifiers.v1.interception import InterceptionServer

CONNECTIONS = 1000
"""As in verifiers' client."""
_IDLE_S = 4.0
"""Shorter than servers keep idle connections (uvicorn: 5 s), so none is closed while a request is sent."""
_OURS = "_harbortrainer_generate_client"
"""Attribute of an OpenAI client with its `GenerateClient`, which lives as long."""
_SERVER_ERROR = 500
_ERRORS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}
"""The OpenAI client's errors, by status."""
_FACTORIES = 1024
"""Default factories whose signatures are remembered."""
_STATISTICS = "X-Stainless"
"""Begins the headers that describe the OpenAI client and its platform."""


@dataclass(frozen=True)
class Answer:
    """A successful answer; `generate` reads nothing else of an `httpx.Response`."""

    content: bytes


class GenerateClient:
    """The part of an OpenAI client that `generate` uses: `base_url`, `get` and `post`.

    Args:
        client: The OpenAI client. Closing it closes this one too.
    """

    def __init__(self, client: AsyncOpenAI) -> None:
        self.base_url, self.get = client.base_url, client.get
        headers, limits = {**client.default_headers, **client.auth_headers}, httpx.Timeout(client.timeout)
        self._headers = {
            name: value
            for name, value in headers.items()
            if isinstance(value, str) and not name.startswith(_STATISTICS)
        }
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=_IDLE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect, sock_read=limits.read),
            trust_env=self.base_url.scheme == "https",  # use a proxy only for remote servers
        )
        vars(client)["close"] = self._closing(client.close)

    def _closing(self, close: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def close_both() -> None:
            await self._session.close()
            await close()

        return close_both

    async def post(
        self,
        url: str,
        *,
        cast_to: type[httpx.Response],
        body: Mapping[str, object],
        options: Mapping[str, Mapping[str, str]] | None = None,
    ) -> Answer:
        """Post a JSON body.

        Args:
            url: The absolute address.
            cast_to: Always `httpx.Response`.
            body: The request.
            options: Further `headers`.

        Raises:
            APIStatusError: The server answered with a status of 400 or above; the OpenAI client's subclass for it.
            APITimeoutError: The server did not connect or answer within the time limits of the OpenAI client.
            APIConnectionError: There was no complete answer.
        """
        assert cast_to is httpx.Response
        headers = self._headers | dict((options or {}).get("headers", {}))
        try:
            async with self._session.post(url, data=to_json(body), headers=headers) as answer:
                content = await answer.read()
        except TimeoutError as error:
            raise APITimeoutError(httpx.Request("POST", url)) from error
        except aiohttp.ClientError as error:
            raise APIConnectionError(request=httpx.Request("POST", url)) from error
        if answer.status < httpx.codes.BAD_REQUEST:
            return Answer(content)
        request = httpx.Request("POST", url)
        response = httpx.Response(answer.status, headers=answer.headers, content=content, request=request)
        kind = _ERRORS.get(answer.status, APIStatusError if answer.status < _SERVER_ERROR else InternalServerError)
        raise kind(f"Error code: {answer.status} - {response.text}", response=response, body=None)


def over_aiohttp[T](generate: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Wrap renderers' `generate`, so that a `GenerateClient` sends its requests, one for each OpenAI client."""

    @wraps(generate)
    def call(*, client: AsyncOpenAI, **others: object) -> Awaitable[T]:
        attributes = vars(client)
        if _OURS not in attributes:
            attributes[_OURS] = GenerateClient(client)
        return generate(client=attributes[_OURS], **others)

    return call


def without_repeated_signatures() -> None:
    """Make pydantic inspect the signature of a default factory once."""
    from pydantic._internal import _fields

    inspects = getattr(_fields, "takes_validated_data_argument", None)
    if inspects is not None and not hasattr(inspects, "__wrapped__"):
        known = lru_cache(_FACTORIES)(inspects)

        @wraps(inspects)
        def takes_data(factory: Callable[..., object]) -> bool:
            return known(factory) if isinstance(factory, Hashable) else inspects(factory)

        vars(_fields)["takes_validated_data_argument"] = takes_data


class Tokenizer(Protocol):
    """The methods of a tokenizer that `_after_header` calls."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def __hash__(self) -> int: ...


class HeaderTokenizer:
    """The part of a tokenizer that `_after_header` uses; encodes each header once.

    Args:
        tokenizer: The tokenizer of a renderer, which the process keeps.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encode, self.decode = cache(tokenizer.encode), tokenizer.decode


def without_repeated_headers() -> None:
    """Make renderers encode the header of an assistant message once for each tokenizer."""
    try:
        from renderers import reasoning
    except ImportError:  # an older release
        return
    after_header = getattr(reasoning, "_after_header", None)
    if after_header is None or hasattr(after_header, "__wrapped__"):
        return
    header_tokenizer = cache(HeaderTokenizer)

    @wraps(after_header)
    def call(tokenizer: Tokenizer, *args: object, **others: object) -> list[int]:
        return after_header(header_tokenizer(tokenizer), *args, **others)

    vars(reasoning)["_after_header"] = call


_CHAT = "/v1/chat/completions"


class LocalRequest(dict[object, object]):
    """The part of an `aiohttp.web.Request` that the interception server uses; it keeps values in it, as in a dict.

    Args:
        headers: The headers, of any case.
        body: The JSON body.
    """

    path = _CHAT

    def __init__(self, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__()
        self.headers = CIMultiDict(headers)
        self._read_bytes: bytes | None = body
        """The server sets it to None once it has parsed the body."""

    async def read(self) -> bytes:
        """Return the body."""
        assert self._read_bytes is not None
        return self._read_bytes


type Handler = Callable[[LocalRequest], Awaitable[web.StreamResponse]]


async def handle_locally(handler: Handler, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
    """Let a server's handler answer a chat completion that is not streamed. Returns status and body."""
    answer = await handler(LocalRequest(headers, body))
    assert isinstance(answer, web.Response) and isinstance(answer.body, bytes)
    return answer.status, answer.body


def without_loopback_http() -> None:
    """Register each interception server that starts in this process, until it stops, as an endpoint of `ChatClient`."""
    from verifiers.v1.interception import InterceptionServer

    start = InterceptionServer.start
    if hasattr(start, "__wrapped__"):
        return

    @wraps(start)
    async def start_and_register(self: "InterceptionServer") -> None:
        await start(self)
        assert self.runner is not None
        for route in self.runner.app.router.routes():
            if route.method == "POST" and route.resource is not None and route.resource.canonical == _CHAT:
                key = asyncio.get_running_loop(), f"{self.base_url.rstrip('/')}{_CHAT}"
                ENDPOINTS[key] = partial(handle_locally, cast(Handler, route.handler))
                self.stack.callback(ENDPOINTS.pop, key, None)

    setattr(InterceptionServer, "start", start_and_register)  # noqa: B010 - a method of a class of verifiers
