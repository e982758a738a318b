"""A hard cap on trials at once over several processes: numbered lock files in a shared folder.

A process that holds the lock on `slot-K` runs the trial of slot K. Invariant: at most `n` trials run at once
over all processes that share the folder and `n`; a process that is killed gives its slots back, since the
kernel drops its locks (the files are opened close-on-exec, so no sandbox keeps one alive).
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

from harbortrainer.runs.file_lock import file_lock

# One queue per event loop: only one waiter of a process polls the files.
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Path, int], "Slots"]] = WeakKeyDictionary()


@asynccontextmanager
async def slot(folder: Path, n: int | None) -> AsyncGenerator[None]:
    """Hold one of the `n` slots shared by every process with this trials `folder` (None: no cap)."""
    if n is None:
        yield
        return
    shared = _slots.setdefault(asyncio.get_running_loop(), {})
    async with shared.setdefault((folder, n), Slots(folder / ".slots", n)).hold():
        yield


class Slots:
    """The slots of one folder, as one process sees them."""

    def __init__(self, folder: Path, n: int) -> None:
        self.files = [folder / f"slot-{number}" for number in range(n)]
        self._queue = asyncio.Lock()

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[int]:
        """Wait for a free slot, in order of arrival within the process, and hold it. Yields its number."""
        async with AsyncExitStack() as held:
            async with self._queue:
                number = await held.enter_async_context(file_lock(*self.files))
            yield number
