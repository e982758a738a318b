"""Removal of containers in the background, and the daemon's events on the exit of a trial's container.

A daemon kills a container's processes at once, but takes 0.1 s or more to clean up. If the daemon is on this machine,
`kill_and_remove` waits only until the kernel reports that the processes are dead.

Only events show who ended a container. A daemon keeps the last 256 events of all containers, and a container at its
memory limit emits hundreds a second. `ExitEvents` therefore subscribes before the container starts.

Invariants:
- When `kill_and_remove` returns, no process runs in the container.
- This process does not exit before its removals are done. If it is killed, the remains carry the run's label.
"""

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiodocker import Docker
from aiodocker.exceptions import DockerError

from harbortrainer.sandbox.containers import daemon_client

GONE_STATUSES = (404, 409)
"""Status codes for a container that is removed or being removed."""
_log = logging.getLogger(__name__)
_removal_slots = threading.BoundedSemaphore(8)
_pending: dict[str, Future[Exception | None]] = {}
"""Running removals by container name."""


async def kill_and_remove(container: str, name: str, init_pid: int, *, volumes: bool) -> None:
    """Kill and remove a container; return when no process runs in it. The removal continues in the background.

    Args:
        container: Its id.
        name: Its name, which stays taken until it is removed.
        init_pid: The id of its init process, as reported by the daemon.
        volumes: Whether its anonymous volumes are removed too.

    Raises:
        DockerError: The daemon refused.
        ConnectionError: The daemon does not answer. Later errors are only logged.
    """
    async with _watch_exit(init_pid, container) as exited:
        removal = _start_removal(container, name, volumes=volumes)
        await asyncio.wait((asyncio.wrap_future(removal), exited), return_when=asyncio.FIRST_COMPLETED)
        if removal.done() and (error := removal.result()) is not None:
            raise error


async def wait_removed(name: str | None = None) -> None:
    """Wait for all removals that this process has started, or for the one of the named container."""
    for waited_name in list(_pending) if name is None else [name]:
        if (removal := _pending.get(waited_name)) is not None:
            await asyncio.wait([asyncio.wrap_future(removal)])


def _start_removal(container: str, name: str, *, volumes: bool) -> Future[Exception | None]:
    """Start a removal in a non-daemon thread: the interpreter waits for it at exit, and nothing cancels it."""
    removal: Future[Exception | None] = Future()
    _pending[name] = removal

    def run() -> None:
        error: Exception | None = None
        try:
            with _removal_slots:
                asyncio.run(_remove(container, volumes=volumes))
        except Exception as raised:  # noqa: BLE001 - logged, and returned to the waiting caller
            _log.warning("container %s could not be removed: %s", name, error := raised)
        finally:
            if _pending.get(name) is removal:
                del _pending[name]
            removal.set_result(error)

    threading.Thread(target=run, name=f"removal of {name}").start()
    return removal


async def _remove(container: str, *, volumes: bool) -> None:
    opened = await daemon_client.open_client()  # a client belongs to one event loop
    if opened is None:
        raise ConnectionError("the Docker daemon does not answer")
    client, _ = opened
    try:
        await client.containers.container(container).delete(force=True, v=volumes)
    except DockerError as error:
        if error.status not in GONE_STATUSES:
            raise
    finally:
        await client.close()


@asynccontextmanager
async def _watch_exit(pid: int, container: str) -> AsyncGenerator[asyncio.Future[None]]:
    """Yield a future that is done when the container's init process, and so every process in it, has ended.

    The future is never done if the process is on another machine.
    """
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[None] = loop.create_future()
    try:
        pidfd = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or the process has ended or is on another machine
        yield exited
        return
    try:
        if container in _read_cgroups(pid):
            loop.add_reader(pidfd, lambda: exited.done() or exited.set_result(None))
        yield exited
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        exited.cancel()


def _read_cgroups(pid: int) -> str:
    """Return the cgroups of a process. They name its container, since the id may belong to another process here."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


DIE_ACTION = "die"
EXTERNAL_ACTIONS = frozenset({"kill", "stop", "restart", "pause", "destroy", "update"})
"""Event actions that show an intervention from outside the container."""
EXIT_EVENT_WAIT_S = 1.0
"""Seconds to wait for the exit events."""


class ExitEvents:
    """Subscription to the events of one trial's container. Create it with `await ExitEvents.subscribe(...)`."""

    def __init__(self, client: Docker, label: str) -> None:
        self._client = client
        filters = {"label": [label], "event": [DIE_ACTION, *sorted(EXTERNAL_ACTIONS)]}
        self._messages = client.events.subscribe(create_task=False)
        self._listener = asyncio.create_task(
            client.events.run(filters=json.dumps(filters), since=str(int(time.time())))
        )
        self._actions: set[str] = set()
        self._closed = False

    @classmethod
    async def subscribe(cls, label: str) -> "ExitEvents | None":
        """Subscribe to the events of the labelled container; None if aiodocker cannot reach the daemon."""
        opened = await daemon_client.open_client()
        return cls(opened[0], label) if opened is not None else None

    async def actions(self) -> set[str]:
        """Return the actions up to one second from now. A daemon may report a kill after it reports the exit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_EVENT_WAIT_S):
                while not self._closed:
                    event = await self._messages.get()
                    if event is None:
                        self._closed = True
                    else:
                        self._actions.add(event["Action"])
        return self._actions

    async def close(self) -> None:
        """Close the subscription."""
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)
        await self._client.close()
