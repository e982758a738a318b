"""Graceful stop: the first Ctrl-C finishes cleanly, the second exits at once.

Invariant: while a `StopSignal` is armed, SIGINT and SIGTERM only set a flag that the loop waits on. They never raise
during a checkpoint.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Self

from harbortrainer.errors import EXIT_INTERRUPTED


def stop_event() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set from now on. Call it from the main thread."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    return stopping


class StopSignal:
    """A stop flag that signals set. Arm it as a context manager, in the main thread.

    Example:
        >>> with StopSignal() as stop:
        ...     stop.requested
        False
    """

    def __init__(self) -> None:
        self.requested = False
        self._wake: Callable[[], object] | None = None
        self._disarm = ExitStack()

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._disarm.callback(signal.signal, number, signal.signal(number, self._on_signal))
        return self

    def __exit__(self, *exc: object) -> None:
        self._disarm.close()

    async def wait(self) -> None:
        """Wait until a stop is requested. From here on, a request wakes the event loop and raises nothing."""
        event = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, event.set)
        if not self.requested:
            await event.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            # The environment servers read end-of-file and clean up.
            os.write(2, b"\nstopped at once\n")
            os._exit(EXIT_INTERRUPTED)
        os.write(2, b"\nstopping (once more to stop at once) ...\n")
        self.requested = True
        if self._wake is None:
            # Nothing checks the flag yet: the warm-up runs, or a model is being loaded.
            raise KeyboardInterrupt
        self._wake()
