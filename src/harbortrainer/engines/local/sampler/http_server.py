"""The sampler's HTTP server: routes, error statuses, and the thread that it runs in.

Contract:
    - Every request needs the server's key as a bearer token; any other gets 401.
    - A bad request gets 400 (404 for an unknown model) with a one-line message.
    - A failed engine gives 500, and 503 at `/health`.
    - A client that disconnects frees its request's slot.
    - The port is bound in the caller's thread, so a port in use is the caller's `UserError`.
    - `start` returns once requests are answered, or raises the engine's start error.
"""

import asyncio
import errno
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Protocol

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from harbortrainer.engines.local.sampler.requests import BadRequestError, ChatRequest, GenerateRequest, parse_request
from harbortrainer.engines.local.sampler.sampling_engine import EngineFailedError
from harbortrainer.errors import UserError

_CLIENT_GONE = 499
_ERROR_TYPES = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError"}
_UNAUTHORIZED = 401

KEY_VARIABLE = "HARBORTRAINER_SAMPLER_KEY"
"""Environment variable with the key of `harbortrainer serve`."""


class CompletionService(Protocol):
    """The service behind the endpoints: our own engine, or the vLLM proxy."""

    @property
    def model_names(self) -> Sequence[str]: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def failure(self) -> BaseException | None: ...
    async def generate(self, request: GenerateRequest, session: str) -> dict[str, object]: ...
    async def chat(self, request: ChatRequest, session: str) -> dict[str, object]: ...


def default_key() -> str:
    """Return the key in the environment variable, else a random one."""
    return os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)


def build_app(service: CompletionService, api_key: str) -> FastAPI:
    """Build the web application for one service; routes that are added later need the key too."""

    async def require_key(request: Request) -> None:
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent.encode(), api_key.encode()):
            raise HTTPException(_UNAUTHORIZED, "wrong or missing API key")

    app = FastAPI(openapi_url=None, dependencies=[Depends(require_key)])
    _add_error_handlers(app)
    _add_sampling_routes(app, service)
    _add_status_routes(app, service)
    return app


def error_response(message: str, status: int) -> Response:
    """Build an error response in OpenAI's format."""
    error_type = _ERROR_TYPES.get(status, "InternalServerError")
    return JSONResponse({"error": {"message": message, "type": error_type, "param": None, "code": status}}, status)


def _add_sampling_routes(app: FastAPI, service: CompletionService) -> None:
    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        parsed = parse_request(GenerateRequest, await request.body())
        return await _while_connected(request, service.generate(parsed, _session(request)))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        parsed = parse_request(ChatRequest, await request.body())
        return await _while_connected(request, service.chat(parsed, _session(request)))


def _add_status_routes(app: FastAPI, service: CompletionService) -> None:
    started = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        if service.failure is not None:
            return error_response(f"the engine has failed: {service.failure}", 503)
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        base = service.model_names[0]
        cards = [
            {
                "id": name,
                "object": "model",
                "created": started,
                "owned_by": "harbortrainer",
                "root": name,
                "parent": None if name == base else base,
                "max_model_len": service.max_model_len,
            }
            for name in service.model_names
        ]
        return JSONResponse({"object": "list", "data": cards})


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return error_response(str(error.detail), error.status_code)

    @app.exception_handler(BadRequestError)
    async def bad(_: Request, error: BadRequestError) -> Response:
        return error_response(str(error), error.status)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        del error
        return Response(status_code=_CLIENT_GONE)

    @app.exception_handler(EngineFailedError)
    async def failed(_: Request, error: EngineFailedError) -> Response:
        return error_response(str(error), 500)


def _session(request: Request) -> str:
    return request.headers.get("x-session-id", "")


async def _while_connected(request: Request, work: Coroutine[None, None, dict[str, object]]) -> Response:
    """Run `work`, and cancel it if the client disconnects first."""
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_wait_disconnected(request))
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(working.result()) if working.done() else Response(status_code=_CLIENT_GONE)
    finally:
        disconnecting.cancel()
        working.cancel()


async def _wait_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to a port of an address of this machine; port 0 picks a free one.

    Raises:
        UserError: The address is another machine's, or the port is in use or may not be used.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            do = "name one of this machine, which serves the policy itself"
            raise UserError("is not an address of this machine", where=host, do=do) from error
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise UserError(f"port {port} {reason}", where=host, do="name another port, or 0 for any free one") from error
    listener.set_inheritable(False)
    return listener


class HttpServer:
    """Runs an app in a thread of its own until stopped.

    Args:
        open_app: Called on the server's event loop before the first request. Starts the engine and builds the app.
        close_app: Called on the same loop after the last request.
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
        """Start the server and return once it answers requests; raises what `open_app` raised."""
        self._thread.start()
        self._ready.result()

    def call[T](self, work: Coroutine[None, None, T]) -> T:
        """Run `work` on the server's event loop and return its result. Call it from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._ready.result()).result()

    def stop(self) -> None:
        """Close the port and end the thread. Safe to call twice."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        if self._thread.is_alive():
            self._thread.join(30.0)
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
        self._uvicorn = _ReadyServer(config, self._ready)
        await self._uvicorn.serve(sockets=[self._listener])


class _ReadyServer(uvicorn.Server):
    """A uvicorn server that resolves a future once it answers requests."""

    def __init__(self, config: uvicorn.Config, ready: Future[asyncio.AbstractEventLoop]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set_result(asyncio.get_running_loop())
