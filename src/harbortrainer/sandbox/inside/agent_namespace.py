"""The agent's process, mount and user namespaces, nested in the sandbox's own namespaces.

The init process of these namespaces starts the agent's commands. The sandbox's own init process, outside them, starts
the grading commands. Both share the network and all files except /tests and /logs/verifier.

Invariants: a process in these namespaces cannot name, signal or trace a verifier process, and cannot see or change the
verifier's /tests and /logs/verifier. The reverse is allowed. The init process survives any kill from inside.
"""

import contextlib
import os
import select
import signal
import socket
from dataclasses import dataclass

from harbortrainer.sandbox.inside import commands, filesystem, user_namespace
from harbortrainer.sandbox.inside import messages as m
from harbortrainer.sandbox.inside import syscalls as k
from harbortrainer.sandbox.inside.commands import CommandRunner

ALL_PROCESSES = -1
"""The id of a `Kill` for every process in the agent's namespaces."""
_MAX_NOTES = 20


@dataclass(frozen=True)
class AgentNamespace:
    """Handle that the sandbox's init process holds on the agent's namespaces."""

    pid: int
    socket: socket.socket

    def send_files_ready(self) -> None:
        """Tell the agent's init process that the filesystem is built and the grader has its own mount namespace."""
        self.socket.send(b"f")

    def send_user_namespace(self, proc: int) -> None:
        """Send this process's user namespace: the agent's init process creates its own below it.

        Args:
            proc: A descriptor of a writable /proc.
        """
        own = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        socket.send_fds(self.socket, [b"u"], [own, proc])
        os.close(own)

    def write_user_maps(self, proc: int, users: str) -> None:
        """Write the id maps of the agent's user namespace.

        Args:
            proc: A descriptor of a writable /proc.
            users: The map for both user and group ids.

        Raises:
            OSError: The agent's init process ended early, or the kernel refused the maps.
        """
        if not self.socket.recv(1):
            raise OSError("the init process of the agent's namespaces did not start")
        for name in ("uid_map", "gid_map"):
            k.write(f"{self.pid}/{name}", users, folder=proc)
        self.socket.send(b"m")

    def forward(self, packet: bytes, fds: list[int]) -> None:
        """Forward a packet to the agent's init process."""
        m.send_packet(self.socket, packet, fds)

    def kill_all(self) -> None:
        """Request that every process of the agent is killed at once. Never blocks."""
        with contextlib.suppress(OSError):
            self.socket.send(m.encode(m.Kill(ALL_PROCESSES)), socket.MSG_DONTWAIT)


def fork() -> AgentNamespace | socket.socket:
    """Fork the agent's init process into a new process namespace. It waits while the filesystem is built.

    Returns:
        In the child, the socket to the parent; in the parent, the handle.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    os.unshare(os.CLONE_NEWPID)
    pid = os.fork()
    if pid:
        os.setns(own, os.CLONE_NEWPID)  # later children stay outside
    os.close(own)
    (there if pid else here).close()
    return AgentNamespace(pid, here) if pid else there


def enter(sync: socket.socket, spec: m.SandboxSpec, owner: int | None) -> None:
    """Enter the mount and user namespaces, each when the parent signals it. Runs in the forked child.

    Args:
        owner: The owner of the sandbox's user namespace.
    """
    sync.recv(1)
    filesystem.enter_agent_namespace(spec)
    _, received, _, _ = socket.recv_fds(sync, 1, 2)
    if not received:
        os._exit(1)  # the parent failed, and reports its own error
    parent, proc = received
    os.setns(parent, os.CLONE_NEWUSER)
    os.close(parent)
    os.unshare(os.CLONE_NEWUSER)
    sync.send(b"u")
    sync.recv(1)
    user_namespace.limit_counters(proc, owner)
    os.close(proc)


class AgentInitProcess:
    """Event loop of the agent's init process: starts and kills commands on request, and reaps ended processes."""

    def __init__(self, requests: socket.socket, control: socket.socket) -> None:
        self._requests, self._notes = requests, 0
        self._runner = CommandRunner(control, self._free_processes)

    def run(self) -> None:
        """Serve requests until the sandbox's init process ends."""
        wakeup = commands.open_child_wakeup()
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == wakeup:
                    os.read(fd, 4096)
                    self._runner.reap()
                elif not self._handle():
                    return

    def _handle(self) -> bool:
        packet, fds = m.receive(self._requests, 3)
        if not packet:
            return False
        try:
            self._dispatch(m.decode(packet), fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _dispatch(self, message: m.Message, fds: list[int]) -> None:
        match message:
            case m.Command():
                self._runner.execute(message, fds, commands.AGENT_OOM_SCORE)
            case m.Kill(id) if id == ALL_PROCESSES:
                self._kill_all()
            case m.Kill(id):
                self._runner.kill(id)

    def _free_processes(self) -> None:
        self._kill_all()
        self._notes += 1
        if self._notes <= _MAX_NOTES:
            text = "no process could be started: all processes of the agent were killed"
            self._runner.send(m.Note(text, is_evidence=False))

    def _kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
