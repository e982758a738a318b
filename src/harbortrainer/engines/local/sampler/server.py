"""uvicorn in a thread of its own, with the engine on its event loop.

Contract: the port is taken in the caller's thread, so that a port in use is the caller's `UserError`; `start` returns
when requests are answered, or raises what kept the engine from starting.
"""

import asyncio
import errno
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import uvicorn
from fastapi import FastAPI

from harbortrainer.errors import UserError


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


class Server:
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

    def call[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the server's event loop and waits for it; from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._ready.result()).result()

    def stop(self, timeout: float = 30.0) -> None:
        """Closes the port and ends the thread; safe to call twice."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._listener.close()

    def wait(self) -> None:
        """Until the thread has ended."""
        while self._thread.is_alive():
            self._thread.join(1.0)

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
