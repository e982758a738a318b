"""A failing model server gives one line of error before any trial."""

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from harbortrainer.errors import UserError
from harbortrainer.evaluation.candidate import probe

GOOD = '{"choices": [{"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}]}'


class Handler(BaseHTTPRequestHandler):
    """Handler that answers with the server's `reply`: status and body by request."""

    server: "Replying"  # ty: ignore[incompatible-mutable-override] - made by one alone

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.asked.append((self.path, asked, self.headers.get("Authorization", "")))
        status, body = self.server.reply(asked)
        if status == 0:
            self.server.let_go.wait(60)  # silent
            return
        self.send_response(status)
        self.send_header("Content-Length", "10000" if body == " " else str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())
        if body == " ":
            self._drip()

    def _drip(self) -> None:
        try:
            while not self.server.let_go.wait(0.1):
                self.wfile.write(b" ")
        except OSError:
            pass

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class Replying(ThreadingHTTPServer):
    """Run a server with one answer for all requests."""

    daemon_threads = True

    def __init__(self, reply) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.asked, self.let_go = reply, [], threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


@contextmanager
def replying(status: int, body: str = "", *, reply=None) -> Generator[Replying]:
    server = Replying(reply or (lambda asked: (status, body)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.let_go.set()
        server.shutdown()
        thread.join()
        server.server_close()


def ask(url: str, answer_s: float = 60.0) -> None:
    probe(url, "m", key="sk-secret", key_var="MY_KEY", answer_s=answer_s)


def test_probe_sends_one_request_without_logprobs() -> None:
    with replying(200, GOOD) as server:
        ask(server.url)
    ((path, asked, key),) = server.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer sk-secret")
    assert "logprobs" not in asked and "token_ids" not in asked


def test_probe_retries_without_max_tokens() -> None:
    def newer(asked: str) -> tuple[int, str]:
        return (400, "Unsupported parameter: 'max_tokens'") if "max_tokens" in asked else (200, GOOD)

    with replying(0, reply=newer) as server:
        ask(server.url)
    assert len(server.asked) == 2


def test_probe_reports_unreachable_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        with pytest.raises(UserError, match=r"cannot be reached .*start the server"):
            ask(f"http://127.0.0.1:{taken.getsockname()[1]}/v1")


@pytest.mark.parametrize(("status", "body"), [(0, ""), (200, " ")], ids=["silent", "drips"])
def test_probe_reports_endless_answer(status: int, body: str) -> None:
    with replying(status, body) as server, pytest.raises(UserError, match=r"did not finish its answer within 0\.5 s"):
        ask(server.url, answer_s=0.5)


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (200, "<html>a proxy's page</html>", "invalid chat completion .*a proxy's page"),
        (200, '{"id": "x"}', "invalid chat completion"),
        (200, '{"choices": []}', "invalid chat completion"),
        (200, "", r"invalid chat completion \(empty\)"),
        (401, "bad key", r"rejects the key .*\$MY_KEY"),
        (404, "no such model", "has no model 'm'.*ends in /v1"),
        (500, "out of memory", "answers 500: out of memory"),
    ],
)
def test_probe_reports_invalid_answer(status: int, body: str, told: str) -> None:
    with replying(status, body) as server, pytest.raises(UserError, match=told) as caught:
        ask(server.url)
    assert "\n" not in str(caught.value) and "sk-secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://", "http://[", "http://no-such-host.invalid/v1"])
def test_probe_reports_invalid_url(url: str) -> None:
    with pytest.raises(UserError, match="cannot be reached"):
        ask(url)
