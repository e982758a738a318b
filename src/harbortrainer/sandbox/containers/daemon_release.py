"""Release of a Docker daemon that waits for a pipe in a container.

For each `docker exec` the daemon reads the container's /etc/passwd and /etc/group, while it holds the container's lock.
If the agent has put a pipe there, no command, inspection or removal of the container would ever end. The pipe is opened
for writing and closed, so the daemon reads an empty file and refuses the command.

Only root on the daemon's machine can do this.
"""

import asyncio
import os
import stat
from contextlib import suppress

from harbortrainer.sandbox.inside import syscalls as k

_TABLES = ("/etc/passwd", "/etc/group")
_INTERVAL_S = 0.5


async def keep_released(pid: int) -> None:
    """Release the daemon whenever it waits, until cancelled or until the container ends.

    Args:
        pid: A process of the container, on this machine.
    """
    with suppress(OSError):  # it has ended, or this user may not open its root
        while True:
            root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for path in _TABLES:
                    _release(root, path)
            finally:
                os.close(root)  # or it would keep the file system of an ended container
            await asyncio.sleep(_INTERVAL_S)


def _release(root: int, path: str) -> None:
    """Open and close a pipe that somebody waits to read. Nothing else is opened: it could be a device."""
    with suppress(OSError):
        fd = k.open_in_root(root, path, os.O_PATH | os.O_CLOEXEC)
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.close(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        finally:
            os.close(fd)
