"""Flood the model proxy of one trial, and measure memory and event loop of the process that serves it.

    python benchmarks/proxy_flood.py [WORD]     only attacks with WORD in their name

The flood comes from another process, and the endpoint behind the proxy is a third one. For each attack it prints the
statuses, the growth of the peak memory, and the longest stall of the event loop. The last row sends an honest
conversation of 2 MB.
"""

import asyncio
import json
import multiprocessing
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from meters import watched_loop

from harbortrainer.environment.environment import import_trial_modules
from harbortrainer.environment.model_proxy.server import ModelProxy

MB = 1 << 20
_PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
_PIPELINED, _SLOW = 20_000, 500
_REPLY = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Done."}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}


@dataclass(frozen=True)
class Flood:
    """`count` requests at once, each with the same body.

    Attributes:
        path: Path of the requests.
        body: Makes the body of `size` bytes, in the process that sends.
    """

    name: str
    path: str
    count: int
    size: int
    body: Callable[[str, int], bytes]


def long_text(path: str, size: int) -> bytes:
    """Return a request with one long message."""
    return _request(path, [{"role": "user", "content": "x" * size}])


def many_messages(path: str, size: int) -> bytes:
    """Return a request with as many short messages as fit."""
    return _request(path, [{"role": "user", "content": "x"}] * (size // 32))


def many_parts(path: str, size: int) -> bytes:
    """Return a request with one message of as many short parts as fit."""
    kind = "input_text" if path == _PATHS["responses"] else "text"
    return _request(path, [{"role": "user", "content": [{"type": kind, "text": ""}] * (size // (22 + len(kind)))}])


def empty_lists(path: str, size: int) -> bytes:
    """Return a request with as many empty lists as fit: most memory per byte."""
    del path
    return b'{"messages":[' + b"[]," * (size // 3) + b"[]]}"


def conversation(path: str, size: int) -> bytes:
    """Return an honest conversation: messages of 4 kB."""
    text = "def f(a, b):\n    return {'sum': [a, b]}\n" * 100
    return _request(path, [{"role": ("user", "assistant")[n % 2], "content": text} for n in range(size // len(text))])


def _request(path: str, messages: list) -> bytes:
    key = "input" if path == _PATHS["responses"] else "messages"
    return json.dumps({"model": "m", "max_tokens": 9, key: messages}).encode()


FLOODS = [
    Flood("first messages request", _PATHS["messages"], 1, 8000, conversation),
    *(Flood(f"12 {name} bodies of 200 MB", path, 12, 200 * MB, long_text) for name, path in _PATHS.items()),
    *(Flood(f"{name}, 36 MB of messages", path, 1, 36 * MB, many_messages) for name, path in _PATHS.items()),
    *(Flood(f"12 {name}, 15 MB of text", path, 12, 15 * MB, long_text) for name, path in _PATHS.items()),
    *(Flood(f"{name}, 15 MB of messages", path, 1, 15 * MB, many_messages) for name, path in _PATHS.items()),
    *(Flood(f"{name}, 15 MB of parts", path, 1, 15 * MB, many_parts) for name, path in _PATHS.items()),
    Flood("12 chat, 15 MB of empty lists", _PATHS["chat"], 12, 15 * MB, empty_lists),
    *(Flood(f"honest: 12 {name} of 2 MB", path, 12, 2 * MB, conversation) for name, path in _PATHS.items()),
]


def send(flood: Flood, port: int, key: str) -> Counter[str]:
    """Send a flood; return the statuses of the replies."""
    body = flood.body(flood.path, flood.size)

    async def one() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(_head(flood.path, key, len(body)))
            for start in range(0, len(body), MB):
                writer.write(body[start : start + MB])
                await writer.drain()
            return (await reader.readline()).split()[1].decode()
        except (ConnectionError, IndexError):
            return "closed"
        finally:
            writer.close()

    async def everything() -> Counter[str]:
        return Counter(await asyncio.gather(*(one() for _ in range(flood.count))))

    return asyncio.run(everything())


def pipeline(port: int, key: str) -> Counter[str]:
    """Send requests on one connection without reading an answer, for two seconds."""
    request = _head(_PATHS["chat"], key, 2) + b"{}"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setblocking(False)
        end, sent, rest = time.monotonic() + 2, 0, memoryview(request * _PIPELINED)
        while rest and time.monotonic() < end:
            try:
                written = connection.send(rest)
                sent, rest = sent + written, rest[written:]
            except BlockingIOError:
                time.sleep(0.01)
    return Counter({f"{sent // MB} MB sent": 1})


def open_slowly(port: int, key: str) -> Counter[str]:
    """Open connections that send half of a request, and hold them for two seconds."""
    half = _head(_PATHS["chat"], key, 15 * MB) + b"x" * MB
    opened: list[socket.socket] = []
    for _ in range(_SLOW):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setblocking(False)
        opened.append(connection)
    end = time.monotonic() + 2
    left = dict.fromkeys(opened, 0)
    while time.monotonic() < end:
        for connection, sent in list(left.items()):
            try:
                left[connection] = sent + connection.send(half[sent : sent + MB])
            except BlockingIOError:
                pass
            except OSError:
                del left[connection]
        time.sleep(0.01)
    for connection in opened:
        connection.close()
    return Counter({f"{len(left)} open": 1})


def _head(path: str, key: str, length: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: proxy", f"Authorization: Bearer {key}", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


def endpoint(ready: "multiprocessing.Queue[int]") -> None:
    """Answer every request at once."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(_REPLY)

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        listening = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listening).start()
        ready.put(listening.getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(serve())


async def measure(word: str, port: int, senders: ProcessPoolExecutor) -> None:
    """Run the floods against a proxy of this process, and print each when it has ended."""
    proxy = ModelProxy(f"http://127.0.0.1:{port}/v1", "endpoint-key", host="127.0.0.1", name="127.0.0.1", trial="flood")
    async with proxy:
        await proxy.start_serving(None)
        there = int(proxy.url.rpartition(":")[2].removesuffix("/v1"))
        key = proxy.key.get_secret_value()
        arms: list[tuple[str, Callable[[], Future[Counter[str]]]]] = [
            (flood.name, lambda flood=flood: senders.submit(send, flood, there, key)) for flood in FLOODS
        ]
        arms.append(("pipelined requests", lambda: senders.submit(pipeline, there, key)))
        arms.append((f"{_SLOW} slow connections", lambda: senders.submit(open_slowly, there, key)))
        for name, start in [arm for arm in arms if word in arm[0]]:
            before, began = _reset_peak(), time.monotonic()
            async with watched_loop() as stall:
                statuses = await asyncio.wrap_future(start())
                took = time.monotonic() - began
                await asyncio.sleep(1)
            grown = _memory("VmHWM") - before
            replies = ", ".join(f"{count} x {status}" for status, count in statuses.items())
            print(f"{name:32} {replies:24} +{grown:5} MB {stall.longest_s:8.3f} s stall {took:6.1f} s", flush=True)


def _reset_peak() -> int:
    """Reset the peak; return the memory now, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) // 1024


def main() -> None:
    import_trial_modules()
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Queue()
    upstream = spawn.Process(target=endpoint, args=(ready,), daemon=True)
    upstream.start()
    try:
        with ProcessPoolExecutor(1, mp_context=spawn) as senders:
            asyncio.run(measure(sys.argv[1] if sys.argv[1:] else "", ready.get(), senders))
    finally:
        upstream.kill()


if __name__ == "__main__":
    main()
