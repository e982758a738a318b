"""The agent's part of a sandbox: process, mount and user namespaces of its own, inside those of the sandbox.

Its first process starts what belongs to the agent; what belongs to grading is started by the sandbox's own first
process, outside. Both see the same files, but for /tests and /logs/verifier, and the same network.

Invariants: a process in here can neither name, signal nor trace one of the verifier's, nor see or change its /tests and
/logs/verifier; one outside can do all of that in here. Whatever is killed in here, the first process stays.
"""

import contextlib
import os
import select
import signal
import socket
from dataclasses import dataclass

from harbortrainer.sandbox.inside import filesystem, spawn
from harbortrainer.sandbox.inside import kernel as k
from harbortrainer.sandbox.inside import messages as m
from harbortrainer.sandbox.inside.command_runner import CommandRunner

EVERYTHING = -1
"""The id of a `Kill` of all that runs in here."""
_MOST_NOTES = 20


@dataclass(frozen=True)
class AgentsPart:
    """The part as the sandbox's first process knows it."""

    pid: int
    socket: socket.socket

    def enter_files(self) -> None:
        """Let its first process enter: the filesystem is there, and the grader has one of its own."""
        self.socket.send(b"f")

    def enter_users(self) -> None:
        """Let it enter a user namespace below this process's own."""
        own = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        socket.send_fds(self.socket, [b"u"], [own])
        os.close(own)

    def map_users(self, proc: int, users: str) -> None:
        """Give that namespace its users.

        Args:
            proc: A descriptor of a writable /proc.
            users: The map of its users and of its groups.
        """
        if not self.socket.recv(1):
            raise OSError("the agent's part of the sandbox did not start")
        for name in ("uid_map", "gid_map"):
            k.write(f"{self.pid}/{name}", users, folder=proc)
        self.socket.send(b"m")

    def forward(self, packet: bytes, fds: list[int]) -> None:
        """Pass a message on."""
        socket.send_fds(self.socket, [packet], fds)

    def sweep(self) -> None:
        """Have all that runs in it killed, as one. Never waits."""
        with contextlib.suppress(OSError):
            self.socket.send(m.encode(m.Kill(EVERYTHING)), socket.MSG_DONTWAIT)


def fork() -> AgentsPart | socket.socket:
    """Fork its first process into a process namespace of its own, early: it waits while the filesystem is made.

    Returns there the socket to this process, here the part.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    os.unshare(os.CLONE_NEWPID)
    pid = os.fork()
    if pid:
        os.setns(own, os.CLONE_NEWPID)  # what is started later stays outside
    os.close(own)
    (there if pid else here).close()
    return AgentsPart(pid, here) if pid else there


def enter(sync: socket.socket) -> None:
    """In the forked process: enter the rest, each as soon as the other side says so."""
    sync.recv(1)
    filesystem.enter_agents_part()
    _, fds, _, _ = socket.recv_fds(sync, 1, 1)
    os.setns(fds[0], os.CLONE_NEWUSER)
    os.close(fds[0])
    os.unshare(os.CLONE_NEWUSER)
    sync.send(b"u")
    sync.recv(1)


class AgentsFirstProcess:
    """The loop of its first process: it starts and kills what it is asked to, and reaps what ends."""

    def __init__(self, requests: socket.socket, control: socket.socket) -> None:
        self._requests, self._notes = requests, 0
        self._runner = CommandRunner(control, self._make_room)

    def run(self) -> None:
        """Serve until the sandbox's first process has ended."""
        woken = spawn.wake_on_children()
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == woken:
                    os.read(fd, 4096)
                    self._runner.reap()
                elif not self._handle():
                    return

    def _handle(self) -> bool:
        packet, fds = m.receive(self._requests, 3)
        if not packet:
            return False
        try:
            self._do(m.decode(packet), fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _do(self, message: m.Message, fds: list[int]) -> None:
        match message:
            case m.Command():
                self._runner.do(message, fds, spawn.AGENTS_ORDER)
            case m.Kill(id) if id == EVERYTHING:
                self._kill_everything()
            case m.Kill(id):
                self._runner.kill(id)

    def _make_room(self) -> None:
        self._kill_everything()
        self._notes += 1
        if self._notes <= _MOST_NOTES:
            self._runner.send(m.Noted("no process could be started: all that the agent ran was killed", sign=False))

    def _kill_everything(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
