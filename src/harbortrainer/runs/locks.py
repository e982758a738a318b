"""File locks between processes, and the lock of a run on its folder.

A lock is the kernel's lock on a file, which ends with its process, also after `kill -9`. The file's contents serve only
the error message. Locks are polled: a waiting thread for each would starve the event loop's thread pool. The file is
closed on exec, so that child processes do not keep the lock. On a file system without locks all raise `NoLocksError`,
except `RunLock` and `refuse_in_use`: a run there has no lock.

Invariant: if two processes open one run folder, one is refused.
"""

import asyncio
import errno
import fcntl
import json
import os
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from harbortrainer.errors import UserError

POLL_S = 0.05
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of file systems without locks."""


class NoLocksError(UserError):
    """The file system has no file locks."""

    def __init__(self, where: str | Path, *, do: str = "") -> None:
        use = "choose an output folder on another one, or mount this one with `flock` (Lustre: also `localflock`)"
        super().__init__("this file system has no file locks", where=str(where), do=do or use)


@asynccontextmanager
async def file_lock(*paths: Path) -> AsyncGenerator[int]:
    """Hold the lock of the first free file of `paths` and yield its index."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        for index, path in enumerate(paths):
            with path.open("a") as file:
                if try_lock(file):
                    yield index
                    return
        await asyncio.sleep(POLL_S)


def try_lock(file: IO[str] | IO[bytes] | int, *, shared: bool = False) -> bool:
    """Lock an open file if it is free, and return whether it was; closing the file releases the lock."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise NoLocksError("" if isinstance(file, int) else file.name) from error
    return True


@asynccontextmanager
async def held(file: IO[bytes]) -> AsyncGenerator[None]:
    """Hold the lock of a file that stays open. The block must not await: other tasks of this process hold it too."""
    while True:
        if try_lock(file):
            break
        await asyncio.sleep(POLL_S)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def waiting_lock(path: Path) -> Generator[None]:
    """Wait for the lock of a file, without an event loop, and hold it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        while not try_lock(file):
            time.sleep(POLL_S)
        yield


LOCK_FILE = ".lock"


class RunLock:
    """The lock on one run folder.

    Args:
        folder: The run folder.
        name: Path of the lock file in the run folder; its parent must exist.

    Raises:
        UserError: Another process holds the lock; the message names it.
    """

    def __init__(self, folder: Path, name: str = LOCK_FILE) -> None:
        self.path = folder / name
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            free = try_lock(self._file)
        except NoLocksError:
            free = True
        if not free:
            self._file.close()
            raise in_use(folder, name)
        self._file.truncate(0)
        started = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
        self._file.write(json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "started": started}) + "\n")
        self._file.flush()

    @property
    def is_held(self) -> bool:
        """Whether the folder is still the locked one: not removed, moved or replaced."""
        ours = os.fstat(self._file.fileno())
        try:
            there = self.path.stat()
        except OSError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def release(self) -> None:
        """Release the lock."""
        self._file.close()


def refuse_in_use(folder: Path, name: str = LOCK_FILE) -> None:
    """Raise `UserError` if a running process has locked the folder; nothing is written."""
    path = folder / name
    if not path.is_file():
        return
    with path.open("a", encoding="utf-8") as file:
        try:
            free = try_lock(file)
        except NoLocksError:
            free = True
    if not free:
        raise in_use(folder, name)


def in_use(folder: Path, name: str) -> UserError:
    """Return the error for a folder that another process has locked."""
    return UserError(
        f"another run is using this folder: {_holder(folder / name)}",
        where=str(folder),
        do="wait until it ends, stop it, or choose another run.name",
    )


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}, since {holder['started']} UTC".replace("+00:00", "")
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has just started"
