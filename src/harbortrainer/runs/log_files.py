"""Size limit of the logs in a run folder.

A log that grows over `LOG_BYTES` is copied to `NAME.log.1`, in place of the copy before it, and emptied, as logrotate's
`copytruncate` does. Lines that are written in between are lost.

Invariant: its writers have opened the log for appending, so that they go on at the new end.
"""

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

LOG_BYTES = 100_000_000
CHECK_S = 60.0


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
