"""The end of a container that nobody waits for: what runs in it is dead, its remains go while other work goes on.

A daemon takes a tenth of a second and more to clear away after a container whose processes it has killed at once. Where
the kernel shows their death (the daemon is on this machine), that is waited for and no more.

Invariant: when `end` returns nothing runs in the container any more. A process does not end by itself before what it
has to remove is removed; what it could not remove, because it was killed, carries its run's label.
"""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path

from aiodocker.exceptions import DockerError

from harbortrainer.sandbox.containers import daemon_client

GONE = (404, 409)
"""What a daemon says of a container that is removed, or being removed."""
_log = logging.getLogger(__name__)
_at_once = threading.BoundedSemaphore(8)
_pending: dict[str, Future[Exception | None]] = {}
"""By the container's name."""


async def end(container: str, name: str, first_process: int, *, volumes: bool) -> None:
    """Kill and remove a container; return when nothing runs in it any more.

    Args:
        container: Its id.
        name: Its name, which it has until it is removed.
        first_process: The first one's number, as the daemon knows it.
        volumes: Whether its anonymous volumes go, too.

    Raises:
        DockerError: The daemon refused.
        ConnectionError: It does not answer. What fails later is on the log alone.
    """
    async with _death_of(first_process, container) as dead:
        removal = _begin(container, name, volumes=volumes)
        await asyncio.wait((asyncio.wrap_future(removal), dead), return_when=asyncio.FIRST_COMPLETED)
        if removal.done() and (error := removal.result()) is not None:
            raise error


async def finished(name: str | None = None) -> None:
    """Wait for the removals that this process has begun, or for that of a container of this name."""
    for waited in list(_pending) if name is None else [name]:
        if (removal := _pending.get(waited)) is not None:
            await asyncio.wait([asyncio.wrap_future(removal)])


def _begin(container: str, name: str, *, volumes: bool) -> Future[Exception | None]:
    """In a thread of its own that is no daemon: what ends waits for it, where a task would be cancelled."""
    removal: Future[Exception | None] = Future()
    _pending[name] = removal

    def run() -> None:
        error: Exception | None = None
        try:
            with _at_once:
                asyncio.run(_remove(container, volumes=volumes))
        except Exception as raised:  # noqa: BLE001 - it is told, and goes to whoever waits
            _log.warning("%s is not removed: %s", name, error := raised)
        finally:
            if _pending.get(name) is removal:
                del _pending[name]
            removal.set_result(error)

    threading.Thread(target=run, name=f"end of {name}").start()
    return removal


async def _remove(container: str, *, volumes: bool) -> None:
    opened = await daemon_client.open_client()  # a client belongs to one event loop
    if opened is None:
        raise ConnectionError("the daemon does not answer")
    client, _ = opened
    try:
        await client.containers.container(container).delete(force=True, v=volumes)
    except DockerError as error:
        if error.status not in GONE:
            raise
    finally:
        await client.close()


@asynccontextmanager
async def _death_of(pid: int, container: str) -> AsyncGenerator[asyncio.Future[None]]:
    """Done when the first process of the container has ended, and with it, says the kernel, all others in there.

    Never done where it is not this machine's.
    """
    loop = asyncio.get_running_loop()
    dead: asyncio.Future[None] = loop.create_future()
    try:
        watched = os.pidfd_open(pid)
    except (AttributeError, OSError):  # no Linux; or it has ended, or is another machine's
        yield dead
        return
    try:
        if container in _groups_of(pid):
            loop.add_reader(watched, lambda: dead.done() or dead.set_result(None))
        yield dead
    finally:
        loop.remove_reader(watched)
        os.close(watched)
        dead.cancel()


def _groups_of(pid: int) -> str:
    """Control groups are named by the container that they are of: the number may be another's here, or by now."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""
