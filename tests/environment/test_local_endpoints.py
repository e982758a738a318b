"""Calls of verifiers' interception server without HTTP: the same answers, and requests that end as over HTTP."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from verifiers.v1.interception import InterceptionServer

from harbortrainer.environment.generate_requests import without_loopback_http
from harbortrainer.trials.chat_client import ChatClient, ClientSettings
from harbortrainer.trials.faults import ModelServerError
from harbortrainer.trials.local_endpoints import ENDPOINTS

pytestmark = pytest.mark.process  # aiohttp asks for the platform


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InterceptionServer]:
    monkeypatch.setattr(InterceptionServer, "start", InterceptionServer.start)  # to be restored
    without_loopback_http()
    async with InterceptionServer() as server:
        yield server


def client_of(url: str, **settings: Any) -> ChatClient:
    table = {"model": "m", "base_url": f"{url}/v1", "backoff_s": 0.0, "retries": 1} | settings
    return ChatClient(ClientSettings.model_validate(table), api_key="unknown", sampling={})


class Endpoint:
    """A local endpoint whose answers a test decides."""

    def __init__(self, seconds: float = 0.0, error: BaseException | None = None) -> None:
        self.seconds, self.error = seconds, error
        self.asked: list[str] = []
        self.answered = 0

    async def __call__(self, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        self.asked.append(headers.get("x-stainless-retry-count", "0"))
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.answered += 1
        return 200, b'{"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}]}'

    def serve(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """Return an address at which no HTTP server listens, and at which this one is registered."""
        url = "http://127.0.0.1:9"
        monkeypatch.setitem(ENDPOINTS, (asyncio.get_running_loop(), f"{url}/v1/chat/completions"), self)
        return url


async def test_server_answers_without_http_as_with_it(server: InterceptionServer) -> None:
    refusals, connections = [], []
    key = asyncio.get_running_loop(), f"{server.base_url}/v1/chat/completions"
    local = ENDPOINTS[key]
    for endpoint in (local, None):
        if endpoint is None:
            del ENDPOINTS[key]
        client = client_of(server.base_url)
        with pytest.raises(ModelServerError) as refusal:
            await client.call("hello")
        refusals.append(str(refusal.value))
        connections.append(client._connections is not None)
        await client.aclose()
    ENDPOINTS[key] = local
    assert connections == [False, True]
    assert refusals[0] == refusals[1]
    assert "unauthorized" in refusals[0]


async def test_stopped_server_is_no_endpoint(server: InterceptionServer) -> None:
    assert [url for _, url in ENDPOINTS] == [f"{server.base_url}/v1/chat/completions"]
    await server.stop()
    assert not ENDPOINTS


async def test_endpoint_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint()
    answer = await client_of(endpoint.serve(monkeypatch)).call("hello")
    assert (answer.content, endpoint.asked) == ("hello", ["0"])


async def test_request_over_its_time_goes_on_and_is_retried_with_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(seconds=0.2)
    with pytest.raises(ModelServerError, match="TimeoutError"):
        await client_of(endpoint.serve(monkeypatch), timeout_s=0.05).call("hello")
    assert (endpoint.asked, endpoint.answered) == (["0", "1"], 0)
    await asyncio.sleep(0.3)
    assert endpoint.answered == 2


async def test_request_goes_on_when_the_agent_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(seconds=0.1)
    call = asyncio.create_task(client_of(endpoint.serve(monkeypatch)).call("hello"))
    await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0.2)
    assert endpoint.answered == 1


async def test_request_that_the_server_cancels_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(error=asyncio.CancelledError())
    with pytest.raises(ModelServerError, match="ServerDisconnectedError"):
        await client_of(endpoint.serve(monkeypatch)).call("hello")
    assert endpoint.asked == ["0", "1"]


async def test_server_that_fails_is_called_over_http_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = Endpoint(error=LookupError("no such session"))
    with caplog.at_level(logging.ERROR), pytest.raises(ModelServerError, match="ClientConnectorError"):
        await client_of(endpoint.serve(monkeypatch)).call("hello")
    assert endpoint.asked == ["0"]
    assert "no such session" in caplog.text
    assert not ENDPOINTS
