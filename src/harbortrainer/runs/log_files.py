"""Logs in a run folder: their size limit and their end.

An own log that grows over `LOG_BYTES` is copied to `NAME.log.1`, in place of the copy before it, and emptied, as
logrotate's `copytruncate` does. Lines that are written in between are lost.

Invariant: its writers have opened the log for appending, so that they go on at the new end.

Prime-RL does not open its logs for appending. The older part of such a log becomes a hole, which takes no disk space
(`fallocate --punch-hole`). The file keeps its size and its newest part, and its writers go on.
"""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

LOG_BYTES = 100_000_000
CHECK_S = 60.0
TAIL_BYTES = 65536
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def last_lines(path: Path) -> list[str]:
    """Return the lines in the last 64 kB of a log, without colours."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return COLOUR.sub("", file.read().decode(errors="replace")).splitlines()


def trim_logs(folder: Path, most: int = LOG_BYTES) -> None:
    """Move the content of every log over `most` bytes to its copy; a log that cannot be copied now stays as it is."""
    for log in folder.glob("*.log"):
        with contextlib.suppress(OSError):  # it was removed, or the disk is full, which ends the run elsewhere
            if log.stat().st_size > most:
                shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                os.truncate(log, 0)


async def limit_logs(folder: Path) -> None:
    """Trim the logs of a run every `CHECK_S` seconds, until cancelled."""
    while True:
        await asyncio.to_thread(trim_logs, folder)
        await asyncio.sleep(CHECK_S)


def free_old_parts(folder: Path, most: int = LOG_BYTES) -> None:
    """Free the disk space of all but the last `most` bytes of every log at any depth, where the file system can."""
    for log in folder.rglob("*.log"):
        with contextlib.suppress(OSError):  # it was removed, or there is no such program
            status = log.stat()
            if log.is_symlink() or status.st_blocks * 512 <= 2 * most:
                continue
            old = str(status.st_size - most)
            command = ["fallocate", "--punch-hole", "--offset", "0", "--length", old, str(log)]
            subprocess.run(command, capture_output=True, check=False)


@contextmanager
def old_parts_freed(folder: Path) -> Generator[None]:
    """Free the old parts of another program's logs every `CHECK_S` seconds within the context."""
    ended = threading.Event()

    def check() -> None:
        while not ended.wait(CHECK_S):
            with contextlib.suppress(OSError):  # a folder was removed meanwhile
                free_old_parts(folder)

    threading.Thread(target=check, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
