"""A lock between processes: the kernel's lock on a file, which it drops with the process that held it.

Polled, not waited for, since a waiting thread each would starve the event loop's pool. The file is closed on exec, so
that nothing that is started meanwhile keeps the lock alive.
"""

import asyncio
import fcntl
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO

POLL_S = 0.05


@asynccontextmanager
async def file_lock(*paths: Path) -> AsyncGenerator[int]:
    """Hold the lock of one of these files, the first that is free. Yields its index."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        for index, path in enumerate(paths):
            with path.open("a") as file:
                if try_lock(file):
                    yield index
                    return
        await asyncio.sleep(POLL_S)


def try_lock(file: IO[str]) -> bool:
    """Take the lock of an open file if it is free; it is let go of when the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def waiting_lock(path: Path) -> Generator[None]:
    """Hold the lock of this file, waiting for it without an event loop."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        while not try_lock(file):
            time.sleep(POLL_S)
        yield
