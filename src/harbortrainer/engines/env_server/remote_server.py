"""The connection to an environment server, on this machine or another one.

verifiers' client waits for an answer without a limit, and ZMQ connects again without a word. A server that was started
again never answers what its predecessor was asked.

Invariant: every guarded request ends: with its answer, or with `ServerLostError` when the connection breaks or the
server falls silent.
"""

import asyncio
import time
from collections.abc import Coroutine

import zmq
from verifiers.v1.serve import EnvClient
from zmq.utils.monitor import recv_monitor_message

from harbortrainer.errors import RunStoppedError

CHECK_S = 10.0
"""Seconds between two checks that the server answers, and the limit of each."""
SILENT_S = 60.0
"""Seconds without an answer after which the server counts as ended."""


class ServerLostError(RuntimeError):
    """The server will not answer a request."""


class RemoteServer:
    """An environment server. Create it in the event loop that uses it.

    Args:
        name: Name of the source, for messages.
        client: The connected client.
        may_be_silent: Whether silence is no end, since this process sees the server's end itself.
    """

    def __init__(self, name: str, client: EnvClient, *, may_be_silent: bool = False) -> None:
        self.name, self._client = name, client
        self.alive = True
        """False once the server has been silent for too long."""
        self._running: set[asyncio.Task[object]] = set()
        self._lost: set[asyncio.Task[object]] = set()
        self._watches = [asyncio.create_task(self._watch_connection())]
        if not may_be_silent:
            self._watches.append(asyncio.create_task(self._watch_answers()))

    async def guard[T](self, request: Coroutine[object, None, T]) -> T:
        """Return the answer to a request.

        Raises:
            ServerLostError: There will be none.
        """
        task = asyncio.create_task(request)
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if task in self._lost:
                raise ServerLostError(f"the environment server at {self._client.address} was lost") from None
            raise
        finally:
            self._running.discard(task)
            self._lost.discard(task)

    def exit_error(self) -> RunStoppedError:
        """Return the error of a silent server."""
        return self.unreachable(self.name, self._client.address)

    @staticmethod
    def unreachable(name: str, address: str) -> RunStoppedError:
        """Return the error of a server that does not answer."""
        what = f"the environment server of {name!r} at {address} does not answer"
        return RunStoppedError(what, do="start it with `harbortrainer serve-env`, then continue with --resume")

    async def close(self) -> None:
        """Stop watching."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)

    def _lose_requests(self) -> None:
        for task in self._running:
            self._lost.add(task)
            task.cancel()

    async def _watch_connection(self) -> None:
        monitor = self._client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            while True:
                await recv_monitor_message(monitor)
                self._lose_requests()
        finally:
            self._client.socket.disable_monitor()
            monitor.close(linger=0)  # the client's context waits for each open socket when it ends

    async def _watch_answers(self) -> None:
        answered = time.monotonic()
        while time.monotonic() - answered < SILENT_S:
            if await self._client.health(timeout=CHECK_S):
                answered = time.monotonic()
                await asyncio.sleep(CHECK_S)
        self.alive = False
        self._lose_requests()
