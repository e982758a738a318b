"""The sandbox's first process: starts commands that it is asked for, reaps what ends, and ends when its socket does.

Messages are JSON, one a packet. In: {"op": "exec", "id", "argv", "call", "cwd", "env", "user"} with three descriptors
(standard input, output, error; with `call`, argv is a function of `files` and its arguments) and {"op": "kill", "id"}.
Out: {"ready": ...} once, {"id", "code"} for each command that ended, {"id", "error"} for one that could not be started.
A code above 128 is 128 + the signal that ended it.

Invariant: when this process ends, the kernel ends every other process of the sandbox with it.
"""

import array
import contextlib
import json
import os
import resource
import select
import signal
import socket
import time
from typing import Any

from harbortrainer.sandbox.inside import commands, files, seccomp, watch
from harbortrainer.sandbox.inside import kernel as k

# chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, sys_chroot, setfcap
_KEEP = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 18, 31})
_MAX_PACKET = 1 << 20
_FORK_ATTEMPTS = 100


def serve(spec: dict[str, Any], control: socket.socket, proc: int, limited: list[str]) -> None:
    """Give up every right that is not needed, then serve until the other end of `control` closes."""
    _no_more_user_namespaces(proc)
    os.close(proc)
    _limits(spec, limited)
    k.keep_capabilities(_KEEP)
    k.no_new_privileges()
    k.hide_arguments("init")
    k.hide_memory()
    seccomp.apply()
    _raise_oom_score()
    os.umask(0o022)
    Server(control, None if "memory" in limited else spec["memory_bytes"]).run(limited)


def _no_more_user_namespaces(proc: int) -> None:
    try:
        fd = os.open("sys/user/max_user_namespaces", os.O_WRONLY, dir_fd=proc)
    except OSError:
        return
    os.write(fd, b"0")
    os.close(fd)


def _limits(spec: dict[str, Any], limited: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(65536, hard), min(65536, hard)))
    if "pids" not in limited:
        resource.setrlimit(resource.RLIMIT_NPROC, (spec["pids"], spec["pids"]))
    if "memory" not in limited:
        resource.setrlimit(resource.RLIMIT_DATA, (spec["memory_bytes"], spec["memory_bytes"]))


class Server:
    """The loop of the first process. Single-threaded: nothing but starting, reaping and killing happens here."""

    def __init__(self, control: socket.socket, watched_bytes: int | None) -> None:
        self._control, self._watched = control, watched_bytes
        self._running: dict[int, int] = {}  # process id -> id of the request
        self._wake_read, wake_write = os.pipe()
        for fd in (self._wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is ignored stays ignored in commands
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def run(self, limited: list[str]) -> None:
        """Serve until end-of-file on the control socket."""
        self._send({"ready": True, "limited": limited})
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            if self._watched is not None and self._running:
                watch.enforce(self._watched)
            for fd, _ in poll.poll(None if self._watched is None else watch.INTERVAL_MS):
                if fd == self._wake_read:
                    os.read(fd, 4096)
                    self._reap()
                elif not self._handle():
                    return

    def _handle(self) -> bool:
        space = socket.CMSG_SPACE(3 * array.array("i").itemsize)
        data, ancillary, _, _ = self._control.recvmsg(_MAX_PACKET, space, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        fds = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content)
        try:
            self._do(json.loads(data), list(fds))
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _do(self, request: dict[str, Any], fds: list[int]) -> None:
        if request["op"] == "exec" and not (request["call"] and self._called(request, fds)):
            self._exec(request, fds)
        elif request["op"] == "kill":
            for pid, wanted in self._running.items():
                if wanted == request["id"]:
                    _kill_group(pid)

    def _called(self, request: dict[str, Any], fds: list[int]) -> bool:
        """Carry out a small call of root's here and now, which saves a process. False when it is not one."""
        name, *arguments = request["argv"]
        try:
            if request["user"] not in commands.ROOT or not files.is_small(fds, name, *arguments):
                return False
            code = files.CALLS[name](fds, *arguments)
        except Exception as error:  # noqa: BLE001 - it is the caller's, and must not end the sandbox
            self._refuse(request, fds, commands.NOT_EXECUTABLE, error)
        else:
            self._send({"id": request["id"], "code": code})
        return True

    def _exec(self, request: dict[str, Any], fds: list[int]) -> None:
        try:
            self._running[self._start(request, fds)] = request["id"]
        except FileNotFoundError as error:
            self._refuse(request, fds, commands.NOT_FOUND, error)
        except BlockingIOError as error:
            self._send({"id": request["id"], "error": f"cannot start a process in the sandbox: {error}"})
        except OSError as error:
            self._refuse(request, fds, commands.NOT_EXECUTABLE, error)

    def _start(self, request: dict[str, Any], fds: list[int]) -> int:
        """Start a command. When the process limit leaves no room, everything else in the sandbox is killed first.

        Otherwise a fork bomb would keep the verifier from grading what its author has done.
        """
        start = commands.fork if request["call"] or request["user"] not in commands.ROOT else commands.spawn
        for _ in range(_FORK_ATTEMPTS):
            try:
                return start(request, fds)
            except BlockingIOError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
                time.sleep(0.01)
                self._reap()
        return start(request, fds)

    def _refuse(self, request: dict[str, Any], fds: list[int], code: int, error: Exception) -> None:
        with contextlib.suppress(OSError):
            os.write(fds[2], f"sandbox: {error}\n".encode())
        self._send({"id": request["id"], "code": code})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            request = self._running.pop(pid, None)
            if request is not None:
                code = os.waitstatus_to_exitcode(status)
                self._send({"id": request, "code": code if code >= 0 else 128 - code})

    def _send(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _raise_oom_score() -> None:
    """When the machine's memory runs out, a sandbox goes first; in it, the largest process."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    except OSError:
        return
    os.write(fd, b"500")
    os.close(fd)
