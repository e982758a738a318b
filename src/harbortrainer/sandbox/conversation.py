"""A command in a sandbox that is talked to while it runs, instead of one command after the other.

Whatever comes from inside is the agent's to forge: it is bounded, and read as bytes. Invariant: after `close` none of
the descriptors is open, whether the command lives or not.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

_CHUNK = 1 << 18
_MOST = 1 << 26
_FULL_WAIT_S = 0.005


class ConversationOverError(Exception):
    """The command has ended, or says more than anybody wants to keep."""


class Conversation:
    """Make it in a running event loop.

    Args:
        run: Runs the command to its end, with the given standard input and output.
    """

    def __init__(self, run: Callable[[int, int], Awaitable[object]]) -> None:
        self._loop = asyncio.get_running_loop()
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        self._fds = [theirs_in, self._write, self._read, theirs_out]
        for fd in (self._write, self._read):
            os.set_blocking(fd, False)
        self._received, self._end = bytearray(), b""
        self._answer: asyncio.Future[None] | None = None
        self._loop.add_reader(self._read, self._readable)
        self._running = asyncio.ensure_future(run(theirs_in, theirs_out))
        self._running.add_done_callback(self._over)

    async def ask(self, request: bytes, end: bytes) -> bytes:
        """Send a request; what came since then, up to `end` and with it.

        One at a time. What an earlier request that was cancelled brings may come first.

        Args:
            end: Bytes that nothing but the answer's end can be.

        Raises:
            ConversationOverError: There will be no answer.
        """
        self._check()
        self._received, self._end = bytearray(), end
        answer = self._answer = self._loop.create_future()
        try:
            await self._send(request)
            await answer
        finally:
            if self._answer is answer:  # else one that was cancelled ends after the next has begun
                self._answer = None
        return bytes(self._received)

    def close(self) -> None:
        """Talk no more. Harmless when it is over already."""
        if self._fds:
            self._loop.remove_reader(self._read)
            self._running.cancel()
            for fd in self._fds:
                os.close(fd)
            self._fds = []

    def _check(self) -> None:
        if not self._fds or self._running.done():
            raise ConversationOverError("the command has ended")

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
            return  # nobody asked
        searched = max(0, len(self._received) - len(self._end))
        self._received += chunk
        if self._received.find(self._end, searched) >= 0:
            self._answer.set_result(None)
        elif len(self._received) > _MOST:
            self._answer.set_exception(ConversationOverError("the answer is too long"))

    def _over(self, running: asyncio.Future[object]) -> None:
        if not running.cancelled():
            running.exception()  # whoever asks is told that it is over, not why
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConversationOverError("the command has ended"))


@runtime_checkable
class Converses(Protocol):
    """An environment in which a command can be talked to."""

    async def converse(
        self, argv: Sequence[str], *, env: dict[str, str] | None = None, user: str | int | None = None
    ) -> Conversation:
        """Start one, without a shell. The environment closes it when it stops."""
        ...
