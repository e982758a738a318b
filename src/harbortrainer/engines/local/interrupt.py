"""Stopping on request: the first Ctrl-C stops cleanly, the second at once.

Invariant: while a `StopSignal` is armed, SIGINT and SIGTERM only set a flag that the loop waits on; they never raise
in the middle of a checkpoint.
"""

import asyncio
import os
import signal
import sys
from types import FrameType
from typing import Any, Self

EXIT_INTERRUPTED = 130


class StopSignal:
    """The flag. Arm it as a context manager, in the main thread.

    Example:
        >>> with StopSignal() as stop:
        ...     stop.requested
        False
    """

    def __init__(self) -> None:
        self.requested = False
        self._event: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def attach(self) -> None:
        """From here on a request wakes `wait` in the running event loop."""
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        if self.requested:
            self._event.set()

    async def wait(self) -> None:
        """Until a stop is requested."""
        assert self._event is not None
        await self._event.wait()

    def request(self) -> None:
        """Ask for a stop."""
        self.requested = True
        if self._loop is not None and self._event is not None:
            self._loop.call_soon_threadsafe(self._event.set)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            # The environment servers read end-of-file and clean up after themselves.
            os.write(2, b"\nstopped at once\n")
            os._exit(EXIT_INTERRUPTED)
        os.write(2, b"\nstopping (once more to stop at once) ...\n")
        self.request()
        if self._loop is None:
            # Nothing is running that could look at the flag: the warm-up, or a model that is being loaded.
            raise KeyboardInterrupt
        sys.stderr.flush()
