"""The train client's requests by aiohttp: answers and failures are what httpx's own transport makes of them."""

import asyncio
import gzip
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from aiohttp import web
from openai import APIConnectionError
from verifiers.v1.clients import TrainClient, TrainClientConfig, train

from harbortrainer.environment.lean_transport import LeanTransport
from harbortrainer.environment.verifiers_side import lean


async def _answer(request: web.Request) -> web.Response:
    if request.path == "/slow":
        await asyncio.sleep(5)
    if request.path == "/gone":
        assert request.transport is not None
        request.transport.close()
    said = f"{request.method} {request.headers['x-key']} {(await request.read()).decode()}".encode()
    if request.path == "/packed":
        return web.Response(body=gzip.compress(said), headers={"Content-Encoding": "gzip"})
    return web.Response(body=said, status=429 if request.path == "/busy" else 200, headers={"x-said": "so"})


@asynccontextmanager
async def _server() -> AsyncGenerator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", _answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with _server() as address:
        yield address


@pytest.mark.parametrize("path", ["", "packed", "busy", "a%2Fb?c=%20d"])
async def test_it_answers_what_httpx_answers(url: str, path: str):
    answers = []
    for transport in (LeanTransport(), httpx.AsyncHTTPTransport()):
        async with httpx.AsyncClient(transport=transport) as http:
            answer = await http.post(f"{url}/{path}", json={"said": "ä"}, headers={"x-key": "k"})
            answers.append((answer.status_code, answer.content, answer.headers.get("x-said"), str(answer.url)))
    assert answers[0] == answers[1]
    assert b"POST k" in answers[0][1]


@pytest.mark.parametrize(
    ("path", "failure"), [("gone", (httpx.ReadError, httpx.RemoteProtocolError)), ("slow", httpx.ReadTimeout)]
)
@pytest.mark.parametrize("kind", [LeanTransport, httpx.AsyncHTTPTransport])
async def test_what_fails_has_httpxs_names(url: str, path: str, failure, kind):
    async with httpx.AsyncClient(transport=kind(), timeout=0.3) as http:
        with pytest.raises(failure):
            await http.get(f"{url}/{path}", headers={"x-key": "k"})


async def test_a_server_that_is_down_cannot_be_connected_to():
    async with httpx.AsyncClient(transport=LeanTransport()) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get("http://127.0.0.1:9/")


def _made(base_url: str) -> TrainClient:
    config = TrainClientConfig(base_url=base_url)
    client = TrainClient(config)
    client.client = lean(train.build_async_openai)(config)
    return client


async def test_a_train_client_sends_by_it_and_says_of_a_failure_what_it_would_have_said():
    client = _made("http://127.0.0.1:9/v1").client
    assert isinstance(client._client._transport, LeanTransport) and client.max_retries == 0
    with pytest.raises(APIConnectionError):
        await client.post("/chat/completions", cast_to=httpx.Response, body={})
    await client.close()


@pytest.mark.parametrize(("url_", "proxy"), [("https://127.0.0.1:9/v1", ""), ("http://127.0.0.1:9/v1", "http://p:1")])
async def test_tls_and_proxies_are_left_to_httpx(monkeypatch, url_: str, proxy: str):
    if proxy:
        monkeypatch.setenv("http_proxy", proxy)
    client = _made(url_).client
    assert not isinstance(client._client._transport, LeanTransport)
    await client.close()
