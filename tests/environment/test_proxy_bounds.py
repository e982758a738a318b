"""Bounds of the model proxy: bodies, requests in flight, connections, and the sampling parameters of agents."""

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from harbortrainer.environment.model_proxy import agent_request, server
from harbortrainer.environment.model_proxy.server import ROUTES, ModelProxy

PATHS = list(ROUTES)
CHAT, MESSAGES, RESPONSES = PATHS
MESSAGE = {"role": "user", "content": "Hello"}
TOOL = {"name": "f", "parameters": {"type": "object"}}
BODIES: dict[str, dict] = {
    CHAT: {"messages": [MESSAGE], "tools": [{"type": "function", "function": TOOL}]},
    MESSAGES: {"messages": [MESSAGE], "max_tokens": 9, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    RESPONSES: {"input": [MESSAGE], "tools": [{"type": "function", **TOOL}]},
}
SAMPLING: dict[str, dict] = {
    CHAT: {
        **{"temperature": 0.1, "top_p": 0.2, "top_k": 3, "min_p": 0.4, "seed": 5, "stop": ["."], "n": 1},
        **{"max_tokens": 6, "max_completion_tokens": 7, "logit_bias": {"8": 9}, "frequency_penalty": 1},
        **{"presence_penalty": 1, "repetition_penalty": 2, "reasoning_effort": "low", "logprobs": True},
        **{"response_format": {"type": "json_object"}, "extra_body": {"top_k": 1}, "chat_template_kwargs": {"a": 1}},
    },
    MESSAGES: {
        **{"temperature": 0.1, "top_p": 0.2, "top_k": 3, "stop_sequences": ["."]},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    RESPONSES: {
        **{"temperature": 0.1, "top_p": 0.2, "max_output_tokens": 16, "top_logprobs": 2},
        **{"reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}}},
    },
}


class Endpoint:
    """Stands in for verifiers' endpoint; answers while `is_open` is set, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        await self.is_open.wait()
        message = {"role": "assistant", "content": "Done."}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        head = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        return web.json_response(head | {"choices": [choice], "usage": usage})


class Rig:
    """A proxy that serves, its endpoint, and a client with the agent's key."""

    def __init__(self, endpoint: Endpoint, proxy: ModelProxy, client: aiohttp.ClientSession) -> None:
        self.endpoint, self.proxy, self._client = endpoint, proxy, client
        self.port = int(proxy.url.split(":")[2].removesuffix("/v1"))

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, str]:
        """Return status and text of the reply; bytes are sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        key = {"Authorization": f"Bearer {self.proxy.key.get_secret_value()}"}
        async with self._client.post(f"http://127.0.0.1:{self.port}{path}", data=data, headers=key | headers) as reply:
            return reply.status, await reply.text()


@pytest.fixture
async def rig() -> AsyncGenerator[Rig]:
    async with _serve() as made:
        yield made


@asynccontextmanager
async def _serve() -> AsyncGenerator[Rig]:
    endpoint = Endpoint()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", endpoint.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    port = runner.addresses[0][1]
    proxy = ModelProxy(f"http://127.0.0.1:{port}/v1", "secret", host="127.0.0.1", name="127.0.0.1", trial="task__1")
    async with proxy, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        await proxy.start_serving(None)
        yield Rig(endpoint, proxy, client)
        endpoint.is_open.set()
    await site.stop()
    await runner.cleanup()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the condition was not met within 10 s")


def large(size: int) -> bytes:
    return json.dumps({"messages": [MESSAGE | {"content": "x" * size}]}).encode()


@pytest.mark.parametrize("path", PATHS)
async def test_body_over_16_mb_is_refused(rig: Rig, path: str) -> None:
    status, text = await rig.post(path, large(17 << 20))
    assert (status, rig.endpoint.requests) == (413, [])
    assert "the request has more than 16777216 bytes" in json.loads(text)["error"]["message"]
    assert "was refused (413)" in rig.proxy.refusals


async def test_body_of_15_mb_reaches_the_model(rig: Rig) -> None:
    status, _ = await rig.post(CHAT, large(15 << 20))
    assert status == 200
    assert len(rig.endpoint.requests[0]["messages"][0]["content"]) == 15 << 20


async def test_compressed_body_counts_uncompressed(rig: Rig) -> None:
    small, bomb = gzip.compress(large(1000)), gzip.compress(large(64 << 20))
    assert (await rig.post(CHAT, small, **{"Content-Encoding": "gzip"}))[0] == 200
    assert (await rig.post(CHAT, bomb, **{"Content-Encoding": "gzip"}))[0] == 413
    assert (await rig.post(CHAT, b"no gzip", **{"Content-Encoding": "gzip"}))[0] == 400


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b'{"messages":[' + b"{}," * 20_000 + b"{}]}", 413, "more than 20000 JSON objects"),
        (b'{"messages":[' + b"[]," * 500_000 + b"[]]}", 413, "more than 1000000 commas and brackets"),
        (b"[" * 100_000, 400, "RecursionError"),
        (b'{"messages":' + b"1" * 100_000 + b"}", 400, "ValueError"),
        (b"[]", 400, "cannot be read"),
    ],
)
async def test_costly_json_is_refused(rig: Rig, body: bytes, status: int, reason: str) -> None:
    for path in PATHS:
        got, text = await rig.post(path, body)
        assert got == status
        assert reason in text or status == 400
    assert rig.endpoint.requests == []


def turns(path: str, count: int) -> dict:
    """Return a request with a long history of tool calls."""
    text = "x,{[" * 40
    if path == CHAT:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"command": text})}}
        turn: list[dict] = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        turn += [{"role": "tool", "tool_call_id": "a", "content": text}]
        return BODIES[path] | {"messages": [MESSAGE, *(turn * count)]}
    if path == MESSAGES:
        use = {"type": "tool_use", "id": "a", "name": "f", "input": {"command": text}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": text}]}
        turn = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        return BODIES[path] | {"messages": [MESSAGE, *(turn * count)]}
    turn = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": text}]
    turn += [{"type": "function_call_output", "call_id": "a", "output": text}]
    return BODIES[path] | {"input": [MESSAGE, *(turn * count)]}


@pytest.mark.parametrize("path", PATHS)
async def test_conversation_of_2000_turns_is_within_the_bounds(rig: Rig, path: str) -> None:
    status, text = await rig.post(path, turns(path, 2000))
    assert (status, "Done." in text) == (200, True), text[:300]
    assert len(rig.endpoint.requests[0]["messages"]) == 4001


async def test_fifth_request_waits_for_a_place(rig: Rig) -> None:
    rig.endpoint.is_open.clear()
    sent = [asyncio.create_task(rig.post(CHAT, BODIES[CHAT])) for _ in range(10)]
    await until(lambda: len(rig.endpoint.requests) == server.MAX_REQUESTS)
    await asyncio.sleep(0.2)
    assert len(rig.endpoint.requests) == server.MAX_REQUESTS == 4
    rig.endpoint.is_open.set()
    assert [status for status, _ in await asyncio.gather(*sent)] == [200] * 10, "none of them is refused"


async def test_requests_that_wait_when_the_agent_ends_are_refused(rig: Rig) -> None:
    rig.endpoint.is_open.clear()
    sent = [asyncio.create_task(rig.post(CHAT, BODIES[CHAT])) for _ in range(6)]
    await until(lambda: len(rig.endpoint.requests) == 4)
    rig.proxy.stop_serving()
    await rig.proxy.start_serving(None)  # the next step's agent does not wait for the last one's requests
    later = asyncio.create_task(rig.post(CHAT, BODIES[CHAT]))
    await until(lambda: len(rig.endpoint.requests) == 5)
    rig.endpoint.is_open.set()
    assert sorted(status for status, _ in await asyncio.gather(*sent)) == [200] * 4 + [403] * 2
    assert (await later)[0] == 200


@pytest.mark.parametrize("resumes", [False, True], ids=["grading", "next step"])
async def test_request_whose_body_arrives_after_the_agent_has_ended_is_refused(rig: Rig, resumes: bool) -> None:
    body, key = json.dumps(BODIES[CHAT]).encode(), rig.proxy.key.get_secret_value()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode())
    await asyncio.sleep(0.2)  # until the proxy reads the body
    rig.proxy.stop_serving()
    if resumes:
        await rig.proxy.start_serving(None)
    writer.write(body)
    assert (await reader.readline()).split()[1] == b"403"
    assert rig.endpoint.requests == []
    writer.close()


async def test_connections_are_limited(rig: Rig) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", rig.port) for _ in range(server.MAX_CONNECTIONS)]
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    assert await reader.read() == b"", "it is closed at once"
    for _, each in [*opened, (reader, writer)]:
        each.close()

    async def is_served() -> bool:
        try:
            return (await rig.post(CHAT, BODIES[CHAT]))[0] == 200
        except aiohttp.ClientError:
            return False

    for _ in range(100):
        if await is_served():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("no request was served after the connections had closed")


async def test_pipelined_requests_are_not_read_ahead(rig: Rig) -> None:
    rig.endpoint.is_open.clear()
    _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    key, body = rig.proxy.key.get_secret_value(), json.dumps(BODIES[CHAT])
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode() * 100_000)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(writer.drain(), 1)
    assert writer.transport.get_write_buffer_size() > 5_000_000, "the client keeps what the proxy does not read"
    assert len(rig.endpoint.requests) == 1
    writer.transport.abort()


async def test_slow_body_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_request, "READ_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    key = rig.proxy.key.get_secret_value()
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nx-api-key: {key}\r\nContent-Length: 99\r\n\r\n{{".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_agents_sampling_does_not_reach_the_endpoint(
    rig: Rig, path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            status, text = await rig.post(path, BODIES[path] | SAMPLING[path] | {"stream": stream, "model": "any"})
            assert (status, "Done." in text) == (200, True), text
    assert [request.keys() - {"tool_choice"} for request in rig.endpoint.requests] == [{"messages", "tools"}] * 2
    (warning,) = [record.getMessage() for record in caplog.records if "task__1" in record.getMessage()]
    assert all(name in warning for name in SAMPLING[path])


async def test_request_without_sampling_gives_no_warning(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    assert (await rig.post(CHAT, BODIES[CHAT] | {"user": "a", "unknown": 1}))[0] == 200
    assert rig.endpoint.requests == [BODIES[CHAT]]
    assert caplog.records == []


async def test_several_answers_to_one_request_are_refused(rig: Rig) -> None:
    status, text = await rig.post(CHAT, BODIES[CHAT] | {"n": 2})
    assert (status, rig.endpoint.requests) == (400, [])
    assert "n must be 1" in text
    assert (await rig.post(CHAT, BODIES[CHAT] | {"n": None}))[0] == 200
