"""Release of a Docker daemon, and of the harness's commands, that an agent's process in the container holds up.

**Pipes.** For each `docker exec` the daemon reads the container's /etc/passwd and /etc/group, while it holds the
container's lock. If the agent has put a pipe there, no command, inspection or removal of the container would ever end.
The pipe is opened for writing and closed, so the daemon reads an empty file and refuses the command.

**Traces.** A process that traces a command can stop it, or keep its parent from noticing its end. It is killed, unless
it is a part of the command, as a debugger is.

Only root on the daemon's machine can do this.
"""

import asyncio
import os
import re
import signal
import stat
from contextlib import suppress

from harbortrainer.sandbox.inside import syscalls as k
from harbortrainer.sandbox.inside.file_waits import children, descendants, process_namespace
from harbortrainer.sandbox.inside.processes import read

_TABLES = ("/etc/passwd", "/etc/group")
_INTERVAL_S = 0.5
_PARENT = re.compile(r"^PPid:\t(\d+)$", re.MULTILINE)
_TRACER = re.compile(r"^TracerPid:\t([1-9]\d*)$", re.MULTILINE)


async def keep_released(pid: int) -> None:
    """Release the daemon and commands whenever they wait, until cancelled or until the container ends.

    Args:
        pid: The container's first process, on this machine.
    """
    with suppress(OSError):  # it has ended, or this user may not open its root
        while True:
            root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for path in _TABLES:
                    _release(root, path)
            finally:
                os.close(root)  # or it would keep the file system of an ended container
            _kill_tracers(pid)
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


def _kill_tracers(pid: int) -> None:
    """Kill the container's processes that trace a command, which the daemon starts beside the first process."""
    namespace, parent = process_namespace(pid), _PARENT.search(read(f"/proc/{pid}/status"))
    for command in children(int(parent[1])) if parent else ():
        if command == pid or process_namespace(command) != namespace:
            continue
        tree = [command, *descendants(command)]
        for traced in tree:
            found = _TRACER.search(read(f"/proc/{traced}/status"))
            if found and int(found[1]) not in tree and process_namespace(int(found[1])) == namespace:
                with suppress(OSError):  # it has ended
                    os.kill(int(found[1]), signal.SIGKILL)
