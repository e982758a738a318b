"""The sampler's HTTP server: which path is answered by what, which error by which status, and the thread it runs in.

Contract: a bad request is 400 (404 for an unknown model) with a one-line message; an engine that failed is 500, and
`/health` then is 503; a client that goes away frees its request's slot. The port is taken in the caller's thread, so
that a port in use is the caller's `UserError`; `start` returns when requests are answered, or raises what kept the
engine from starting.
"""

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Protocol

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from harbortrainer.engines.local.sampler.requests import BadRequestError, ChatRequest, GenerateRequest, parse
from harbortrainer.engines.local.sampler.sampling_engine import EngineFailedError
from harbortrainer.errors import UserError

_CLIENT_GONE = 499
_KINDS = {400: "BadRequestError", 404: "NotFoundError"}


class Answering(Protocol):
    """What stands behind the endpoints."""

    @property
    def model_names(self) -> Sequence[str]: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def failure(self) -> BaseException | None: ...
    async def generate(self, request: GenerateRequest, session: str) -> dict[str, object]: ...
    async def chat(self, request: ChatRequest, session: str) -> dict[str, object]: ...


def build_app(replies: Answering) -> FastAPI:
    """The application for one engine."""
    app = FastAPI(openapi_url=None)
    _add_errors(app)
    _add_sampling(app, replies)
    _add_information(app, replies)
    return app


def error_response(message: str, status: int) -> Response:
    """An error as OpenAI's clients read it."""
    kind = _KINDS.get(status, "InternalServerError")
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


def _add_sampling(app: FastAPI, replies: Answering) -> None:
    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        asked = parse(GenerateRequest, await request.body())
        return await _while_connected(request, replies.generate(asked, _session(request)))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = parse(ChatRequest, await request.body())
        return await _while_connected(request, replies.chat(asked, _session(request)))


def _add_information(app: FastAPI, replies: Answering) -> None:
    started = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        if replies.failure is not None:
            return error_response(f"the engine has failed: {replies.failure}", 503)
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        base = replies.model_names[0]
        cards = [
            {
                "id": name,
                "object": "model",
                "created": started,
                "owned_by": "harbortrainer",
                "root": name,
                "parent": None if name == base else base,
                "max_model_len": replies.max_model_len,
            }
            for name in replies.model_names
        ]
        return JSONResponse({"object": "list", "data": cards})


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return error_response(str(error.detail), error.status_code)

    @app.exception_handler(BadRequestError)
    async def bad(_: Request, error: BadRequestError) -> Response:
        return error_response(str(error), error.status)

    @app.exception_handler(EngineFailedError)
    async def failed(_: Request, error: EngineFailedError) -> Response:
        return error_response(str(error), 500)


def _session(request: Request) -> str:
    return request.headers.get("x-session-id", "")


async def _while_connected(request: Request, work: Coroutine[None, None, dict[str, object]]) -> Response:
    """Does the work, and drops it when the client goes away first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(working.result()) if working.done() else Response(status_code=_CLIENT_GONE)
    finally:
        leaving.cancel()
        working.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def bind(host: str, port: int) -> socket.socket:
    """A socket on `port`, any free one when it is 0.

    Raises:
        UserError: the port is in use, or may not be used.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise UserError(f"port {port} {reason}", where=host, do="name another port, or 0 for any free one") from error
    listener.set_inheritable(False)
    return listener


class HttpServer:
    """Runs an app until stopped.

    Args:
        open_app: Called on the server's event loop before the first request; starts what the app needs.
        close_app: Called there after the last.
    """

    def __init__(
        self,
        listener: socket.socket,
        open_app: Callable[[], Awaitable[FastAPI]],
        close_app: Callable[[], Awaitable[None]],
    ) -> None:
        self._listener, self._open, self._close = listener, open_app, close_app
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._uvicorn: uvicorn.Server | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="sampler-http", daemon=True)

    def start(self) -> None:
        """Returns when requests are answered; raises what `open_app` raised."""
        self._thread.start()
        self._ready.result()

    def call[T](self, work: Coroutine[None, None, T]) -> T:
        """Runs `work` on the server's event loop and waits for it; from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._ready.result()).result()

    def stop(self, timeout: float = 30.0) -> None:
        """Closes the port and ends the thread; safe to call twice."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._listener.close()

    async def _run(self) -> None:
        opening = asyncio.ensure_future(self._open())
        await asyncio.wait((opening,))
        failure = opening.exception()
        try:
            if failure is not None:
                self._ready.set_exception(failure)
            else:
                await self._serve(opening.result())
        finally:
            await self._close()

    async def _serve(self, app: FastAPI) -> None:
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1, backlog=2048
        )
        self._uvicorn = _Announcing(config, self._ready)
        await self._uvicorn.serve(sockets=[self._listener])


class _Announcing(uvicorn.Server):
    """uvicorn that says when it answers."""

    def __init__(self, config: uvicorn.Config, ready: Future[asyncio.AbstractEventLoop]) -> None:
        super().__init__(config)
        self._announced = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announced.set_result(asyncio.get_running_loop())
