"""A hard cap on trials at once over several processes: numbered lock files in a shared folder.

A process that holds the lock on `slot-K` runs the trial of slot K. Invariant: at most `n` trials run at once
over all processes that share the folder and `n`; a process that is killed gives its slots back, since the
kernel drops its locks (the files are opened close-on-exec, so no sandbox keeps one alive).
"""

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

POLL_S = 0.05

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
        self.folder, self.n = folder, n
        self._queue = asyncio.Lock()

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[int]:
        """Wait for a free slot, in order of arrival within the process, and hold it. Yields its number."""
        number, fd = await self._acquire()
        try:
            yield number
        finally:
            os.close(fd)

    async def _acquire(self) -> tuple[int, int]:
        async with self._queue:
            while True:
                for number in range(self.n):
                    if (fd := _try_lock(self.folder / f"slot-{number}")) is not None:
                        return number, fd
                await asyncio.sleep(POLL_S)


def _try_lock(path: Path) -> int | None:
    """Lock a file; its descriptor, which owns the lock, or None when another one has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
