"""Stopping on request: the first Ctrl-C stops cleanly, the second at once.

Invariant: while a `StopSignal` is armed, SIGINT and SIGTERM only set a flag that the loop waits on; they never raise
in the middle of a checkpoint.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Self

from harbortrainer.errors import EXIT_INTERRUPTED


class StopSignal:
    """The flag. Arm it as a context manager, in the main thread.

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
        """Until a stop is requested. From here on a request wakes the running event loop and raises nothing."""
        event = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, event.set)
        if not self.requested:
            await event.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            # The environment servers read end-of-file and clean up after themselves.
            os.write(2, b"\nstopped at once\n")
            os._exit(EXIT_INTERRUPTED)
        os.write(2, b"\nstopping (once more to stop at once) ...\n")
        self.requested = True
        if self._wake is None:
            # Nothing is running that could look at the flag: the warm-up, or a model that is being loaded.
            raise KeyboardInterrupt
        self._wake()
