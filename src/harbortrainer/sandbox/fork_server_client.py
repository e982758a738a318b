"""Client of the fork server (`inside.fork_server`), the helper process that starts sandboxes.

The server starts on first use, once per process. Invariant: no sandbox outlives this process. However this process
ends, each sandbox then reads end-of-file from its control socket.
"""

import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

from harbortrainer.sandbox.errors_and_changes import SandboxStartError
from harbortrainer.sandbox.inside.messages import HostView, Message, SandboxSpec, encode

_SOURCE = Path(__file__).resolve().parents[2]
_CODE = (
    "import sys; sys.path.insert(0, {source!r}); "
    "from harbortrainer.sandbox.inside import fork_server; fork_server.main({owner})"
)
_ENVIRONMENT = ("LD_LIBRARY_PATH",)  # some interpreters need it to start; no other variable is passed on


class ForkServer:
    """The helper process and the socket to it. `shared` returns the one of this process."""

    def __init__(self) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = here
        self._lock = threading.Lock()
        self._views: set[str] = set()
        # -I -S: without the environment and site-packages it starts in milliseconds and holds none of our data.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE.format(source=str(_SOURCE), owner=os.getpid())],
            stdin=there.fileno(),
            stdout=subprocess.DEVNULL,
            cwd="/",
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,
        )
        there.close()

    @property
    def pid(self) -> int:
        """Process id of the helper."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the helper is running."""
        return self._process.poll() is None

    def wait_ended(self, within: float) -> bool:
        """Wait up to `within` seconds for the helper to end, and return whether it did. Blocks.

        A killed process closes its files before it counts as ended.
        """
        try:
            self._process.wait(within)
        except subprocess.TimeoutExpired:
            return False
        return True

    def start(self, spec: SandboxSpec, view: HostView | None) -> socket.socket:
        """Start one sandbox. Returns its control socket at once; the sandbox later sends `Ready` on it."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._lock:
                if view is not None and view.key not in self._views:
                    self._send(view)
                    self._views.add(view.key)
                self._send(replace(spec, view=view and view.key), there.fileno())
        except OSError as error:
            here.close()
            raise SandboxStartError(f"the helper process that starts sandboxes has ended: {error}") from error
        finally:
            there.close()
        here.setblocking(False)
        return here

    def _send(self, message: Message, *fds: int) -> None:
        memory = os.memfd_create("request", os.MFD_CLOEXEC)
        try:
            os.write(memory, encode(message))
            os.lseek(memory, 0, os.SEEK_SET)
            socket.send_fds(self._socket, [b"m"], [memory, *fds])
        finally:
            os.close(memory)


_shared: dict[int, ForkServer] = {}
_shared_lock = threading.Lock()


def shared() -> ForkServer:
    """Return the fork server of this process. A forked child gets its own; a killed server is replaced."""
    with _shared_lock:
        fork_server = _shared.get(os.getpid())
        if fork_server is None or not fork_server.alive:
            _shared.clear()
            fork_server = _shared[os.getpid()] = ForkServer()
        return fork_server
