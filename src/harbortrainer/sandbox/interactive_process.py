"""A long-running command in a sandbox, with requests on its standard input and answers on its standard output.

The agent can forge every answer, so answers have a size limit and stay bytes. Invariant: after `close`, no descriptor
is open, whether or not the command still runs.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

_CHUNK = 1 << 18
_MAX_ANSWER_B = 1 << 26
_FULL_WAIT_S = 0.005


class InteractiveProcessEndedError(Exception):
    """The command has ended, or its answer exceeds the size limit."""


class InteractiveProcess:
    """One command and the pipes to it. Create it in a running event loop.

    Args:
        run: Runs the command to its end, with the given descriptors as standard input and output.
    """

    def __init__(self, run: Callable[[int, int], Awaitable[object]]) -> None:
        self._loop = asyncio.get_running_loop()
        process_stdin, self._write = os.pipe()
        self._read, process_stdout = os.pipe()
        self._fds = [process_stdin, self._write, self._read, process_stdout]
        for fd in (self._write, self._read):
            os.set_blocking(fd, False)
        self._buffer, self._end = bytearray(), b""
        self._answer: asyncio.Future[None] | None = None
        self._loop.add_reader(self._read, self._readable)
        self._running = asyncio.ensure_future(run(process_stdin, process_stdout))
        self._running.add_done_callback(self._on_end)

    async def query(self, request: bytes, end: bytes) -> bytes:
        """Send a request and return the output since then, up to and including `end`.

        Only one request at a time. The late answer of a cancelled request may come first.

        Args:
            end: Bytes that occur only at the end of the answer.

        Raises:
            InteractiveProcessEndedError: No answer will come.
        """
        self._check()
        self._buffer, self._end = bytearray(), end
        answer = self._answer = self._loop.create_future()
        try:
            await self._send(request)
            await answer
        finally:
            if self._answer is answer:  # a cancelled request may end after the next one has started
                self._answer = None
        return bytes(self._buffer)

    def close(self) -> None:
        """Close the pipes and stop the command. Has no effect when repeated."""
        if self._fds:
            self._loop.remove_reader(self._read)
            self._running.cancel()
            for fd in self._fds:
                os.close(fd)
            self._fds = []

    def _check(self) -> None:
        if not self._fds or self._running.done():
            raise InteractiveProcessEndedError("the command has ended")

    async def _send(self, request: bytes) -> None:
        left = memoryview(request)
        while left:
            self._check()
            try:
                left = left[os.write(self._write, left) :]
            except BlockingIOError:
                await asyncio.sleep(_FULL_WAIT_S)

    def _readable(self) -> None:
        try:
            chunk = os.read(self._read, _CHUNK)
        except BlockingIOError:
            return
        if self._answer is None or self._answer.done():
            return  # output without a request
        searched = max(0, len(self._buffer) - len(self._end))
        self._buffer += chunk
        if self._buffer.find(self._end, searched) >= 0:
            self._answer.set_result(None)
        elif len(self._buffer) > _MAX_ANSWER_B:
            self._answer.set_exception(InteractiveProcessEndedError("the answer is too long"))

    def _on_end(self, running: asyncio.Future[object]) -> None:
        if not running.cancelled():
            running.exception()  # retrieved, so that asyncio logs no unhandled exception
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(InteractiveProcessEndedError("the command has ended"))


@runtime_checkable
class HasInteractiveProcess(Protocol):
    """An environment that can start interactive processes."""

    async def start_interactive(
        self, argv: Sequence[str], *, env: dict[str, str] | None = None, user: str | int | None = None
    ) -> InteractiveProcess:
        """Start a command without a shell. The environment closes it when the environment stops."""
        ...
