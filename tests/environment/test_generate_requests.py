"""Requests of renderers' `generate` over aiohttp: the same request and the same errors as with the OpenAI client."""

import asyncio
import inspect
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic._internal import _fields
from renderers import reasoning

from harbortrainer.environment.generate_requests import (
    GenerateClient,
    over_aiohttp,
    without_repeated_headers,
    without_repeated_signatures,
)

pytestmark = pytest.mark.process  # the OpenAI client asks for the platform

BODY = {"model": "m", "token_ids": [1, 2, 151643], "sampling_params": {"temperature": 0.7, "stop": None, "t": "é"}}
HEADERS = {"X-Session-ID": "trial-1"}


@dataclass
class Engine:
    """An engine that answers every request with one status and body, and keeps the requests."""

    status: int = 200
    content: bytes = b'{"choices": []}'
    seen: list[tuple[dict[str, str], Any]] = field(default_factory=list)
    url: str = ""
    pause_s: float = 0.0

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append((dict(request.headers), json.loads(await request.read())))
        await asyncio.sleep(self.pause_s)
        if not self.status:
            assert request.transport is not None
            request.transport.close()
        return web.Response(status=self.status or 200, body=self.content)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine, app = Engine(), web.Application()
    app.router.add_post("/inference/v1/generate", engine.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    engine.url = f"{site.name}/inference/v1/generate"
    yield engine
    await runner.cleanup()


@pytest.fixture
async def client() -> AsyncIterator[AsyncOpenAI]:
    headers = {"X-Own": "yes"}
    client = AsyncOpenAI(base_url="http://engine/v1", api_key="secret", default_headers=headers, max_retries=0)
    yield client
    await client.close()


async def post(client: AsyncOpenAI | GenerateClient, url: str) -> Any:
    return await client.post(url, cast_to=httpx.Response, body=BODY, options={"headers": HEADERS})


async def test_sends_the_openai_clients_request(engine: Engine, client: AsyncOpenAI) -> None:
    answers = [await post(one, engine.url) for one in (client, GenerateClient(client))]
    assert [answer.content for answer in answers] == [engine.content] * 2
    (theirs, their_body), (ours, our_body) = engine.seen
    assert their_body == our_body == BODY
    per_connection = {"Host", "Content-Length", "Connection", "Accept-Encoding"}
    sent = [{k.lower(): v for k, v in one.items() if k not in per_connection} for one in (theirs, ours)]
    assert sent[1].items() >= {"authorization": "Bearer secret", "x-own": "yes", "x-session-id": "trial-1"}.items()
    assert all(name.startswith("x-stainless-") for name in sent[0].keys() - sent[1].keys())
    assert all(sent[1][name] == sent[0][name] for name in sent[1])


@pytest.mark.parametrize("status", [400, 404, 418, 429, 503, 0], ids=str)
async def test_failure_is_the_openai_clients_error(status: int, engine: Engine, client: AsyncOpenAI) -> None:
    from verifiers.v1.errors import model_error

    engine.status, engine.content = status, b'{"error": {"message": "This model\'s maximum context length is 8"}}'
    errors, kinds = [], set()
    for one in (client, GenerateClient(client)):
        with pytest.raises(openai.APIError) as raised:
            await post(one, engine.url)
        errors.append(model_error(raised.value))
        kinds.add(type(raised.value))
    assert len(kinds) == 1, kinds
    assert type(errors[0]) is type(errors[1]) and errors[0].status_code == errors[1].status_code
    assert len(engine.seen) == 2, "no retries"
    assert not status or "maximum context length" in str(errors[1])


async def test_refused_connection_is_a_connection_error(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.APIConnectionError, match=r"Connection error\."):
        await post(GenerateClient(client), "http://127.0.0.1:9/inference/v1/generate")


@pytest.mark.parametrize("limits", [{"connect": 0.05}, {"read": 0.05}], ids=["connect", "read"])
async def test_time_limits_are_the_openai_clients(limits: dict[str, float], engine: Engine) -> None:
    client = AsyncOpenAI(base_url="http://engine/v1", api_key="k", timeout=httpx.Timeout(None, **limits), max_retries=0)
    engine.pause_s = 600.0
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        unaccepted = f"http://127.0.0.1:{full.getsockname()[1]}/"
        for one in (client, GenerateClient(client)):
            with pytest.raises(openai.APITimeoutError):
                await post(one, engine.url if "read" in limits else unaccepted)
        for filler in fillers:
            filler.close()
    await client.close()


async def test_one_session_per_client_closes_with_it(engine: Engine) -> None:
    used: list[GenerateClient] = []

    async def generate(*, client: GenerateClient, **others: object) -> object:
        used.append(client)
        return others

    client = AsyncOpenAI(base_url="http://engine/v1", api_key="secret")
    call = over_aiohttp(generate)
    assert [await call(client=client, model="m") for _ in range(2)] == [{"model": "m"}] * 2
    assert used[0] is used[1] and used[0].base_url == client.base_url and not used[0]._session.closed
    await client.close()
    assert used[0]._session.closed and client.is_closed()


def test_pydantic_inspects_each_factory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    inspects = inspect.unwrap(_fields.takes_validated_data_argument)

    def count(factory: Callable[[], Any]) -> bool:
        asked.append(factory)
        return inspects(factory)

    class Unhashable:
        __hash__ = None

        def __call__(self) -> str:
            return "made"

    class Node(BaseModel):
        tokens: list[int] = Field(default_factory=list)
        twice: list[int] = Field(default_factory=lambda data: data["tokens"] * 2)
        other: str = Field(default_factory=Unhashable())

    monkeypatch.setattr(_fields, "takes_validated_data_argument", count)
    without_repeated_signatures()
    first, second = Node.model_construct(), Node.model_construct(tokens=[1])
    assert (first.tokens, second.tokens, second.twice) == ([], [1], [1, 1]) and first.tokens is not second.twice
    assert first.other == second.other == "made"
    assert asked.count(list) == 1


def test_header_is_encoded_once_per_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Characters:
        """A tokenizer whose tokens are characters."""

        def __init__(self, shift: int) -> None:
            self.shift, self.encoded = shift, 0

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            self.encoded += 1
            return [ord(character) + self.shift for character in text]

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join(chr(token - self.shift) for token in ids)

    after_header = inspect.unwrap(reasoning._after_header)
    monkeypatch.setattr(reasoning, "_after_header", after_header)
    without_repeated_headers()
    texts = ["<h>\n\nan answer", "no header", "", "<h>", "<h>one<h>two"]
    for tokenizer in (Characters(0), Characters(7)):
        answers = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        for last in (False, True):
            stock = [after_header(tokenizer, ids, "<h>", last=last) for ids in answers]
            tokenizer.encoded = 0
            assert [reasoning._after_header(tokenizer, ids, "<h>", last=last) for ids in answers] == stock
            assert tokenizer.encoded == (not last)
