"""Starts the commands that one process of a sandbox is asked for, kills them, and tells of their ends.

Single-threaded: its owner calls `do` for each `Command` and `reap` whenever a child has ended.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

from harbortrainer.sandbox.inside import file_calls, spawn
from harbortrainer.sandbox.inside import messages as m

_FORK_ATTEMPTS = 100


class CommandRunner:
    """The commands of one process.

    Args:
        control: Where `Ended` and `Failed` are said.
        make_room: Called when the limit of processes leaves no room for a command; kills what may be killed.
    """

    def __init__(self, control: socket.socket, make_room: Callable[[], None]) -> None:
        self._control, self._make_room = control, make_room
        self._running: dict[int, int] = {}  # process id -> id of the request

    def do(self, command: m.Command, fds: list[int], order: int) -> int | None:
        """Carry out a command. Returns its process id; None when it needed none, or could not be started.

        Args:
            fds: Its standard input, output and error.
            order: When the kernel ends it if memory runs out.
        """
        if command.call and self._called(command, fds):
            return None
        try:
            pid = self._start(command, fds, order)
        except BlockingIOError as error:
            self.send(m.Failed(f"cannot start a process in the sandbox: {error}", command.id))
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            self._refuse(command, fds, spawn.NOT_FOUND if missing else spawn.NOT_EXECUTABLE, error)
        else:
            self._running[pid] = command.id
            return pid
        return None

    def kill(self, request: int) -> bool:
        """Kill a command with its process group. False when it is not one that was started here and still runs."""
        pids = [pid for pid, wanted in self._running.items() if wanted == request]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        return bool(pids)

    def reap(self) -> list[int]:
        """Tell of the commands that have ended. Returns all processes that have."""
        ended: list[int] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            ended.append(pid)
            if (request := self._running.pop(pid, None)) is not None:
                code = os.waitstatus_to_exitcode(status)
                self.send(m.Ended(request, code if code >= 0 else 128 - code))

    def send(self, message: m.Message) -> None:
        """Tell the other end of the control socket."""
        self._control.send(m.encode(message))

    def _called(self, command: m.Command, fds: list[int]) -> bool:
        """Carry out a small call of root's here and now, which saves a process. False when it is not one."""
        name, *arguments = command.argv
        try:
            if command.user not in spawn.ROOT or not file_calls.is_small(fds, name, *arguments):
                return False
            code = file_calls.CALLS[name](fds, *arguments)
        except Exception as error:  # noqa: BLE001 - it is the caller's, and must not end the sandbox
            self._refuse(command, fds, spawn.NOT_EXECUTABLE, error)
        else:
            self.send(m.Ended(command.id, code))
        return True

    def _start(self, command: m.Command, fds: list[int], order: int) -> int:
        """Start a command. When the process limit leaves no room, room is made first.

        Otherwise a fork bomb would keep the verifier from grading what its author has done.
        """
        start = spawn.fork if command.call or command.user not in spawn.ROOT else spawn.spawn
        for _ in range(_FORK_ATTEMPTS):
            try:
                return start(command, fds, order)
            except BlockingIOError:
                self._make_room()
                time.sleep(0.01)
                self.reap()
        return start(command, fds, order)

    def _refuse(self, command: m.Command, fds: list[int], code: int, error: Exception) -> None:
        with contextlib.suppress(OSError):
            os.write(fds[2], f"sandbox: {error}\n".encode())
        self.send(m.Ended(command.id, code))
