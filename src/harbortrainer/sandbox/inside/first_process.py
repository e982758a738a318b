"""The sandbox's first process: starts commands that it is asked for, reaps what ends, and ends when its socket does.

In come `Command`, `Kill`, `Grading`, `Look`, `Listen`; out goes `Ready` once, then `Ended` or `Failed` for each, and
`Noted`.
Where the sandbox is divided, what is asked for while nothing is graded is passed on to the agent's part.

Invariant: when this process ends, the kernel ends every other process of the sandbox with it.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import time

from harbortrainer.sandbox.inside import grading_room, memory_watch, processes, seccomp, spawn
from harbortrainer.sandbox.inside import kernel as k
from harbortrainer.sandbox.inside import messages as m
from harbortrainer.sandbox.inside.agents_part import AgentsPart
from harbortrainer.sandbox.inside.command_runner import CommandRunner
from harbortrainer.sandbox.inside.grading_room import GradingRoom

# chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, sys_chroot, setfcap
_KEEP = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 18, 31})
_MOST_NOTES = 20


def give_up_rights(spec: m.SandboxSpec, limited: list[str], name: str) -> None:
    """Keep no right that is not needed, in this process and in all that it starts.

    Args:
        limited: The controllers of the control groups that hold the limits.
        name: What this process is called from now on.
    """
    _limits(spec, limited)
    k.keep_capabilities(_KEEP)
    k.no_new_privileges()
    # When the machine's or the sandbox's memory runs out, its commands go first and this process last.
    spawn.prepare()
    k.hide_arguments(name)
    k.hide_memory()
    seccomp.apply(nameless_files="memory" in limited)
    os.umask(0o022)


def _limits(spec: m.SandboxSpec, limited: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(65536, hard), min(65536, hard)))
    if "pids" not in limited:
        resource.setrlimit(resource.RLIMIT_NPROC, (spec.pids, spec.pids))
    if "memory" not in limited:
        resource.setrlimit(resource.RLIMIT_DATA, (spec.memory_bytes, spec.memory_bytes))


class FirstProcess:
    """The loop of the first process. Single-threaded: nothing but starting, reaping and killing happens here.

    Args:
        monitor: To the process outside that may widen the limits.
        agents: The part in which the agent's commands run; None where there is none.
        watched: Whether memory and processes are bounded from here.
    """

    def __init__(
        self,
        spec: m.SandboxSpec,
        control: socket.socket,
        monitor: socket.socket,
        agents: AgentsPart | None,
        *,
        watched: bool,
    ) -> None:
        self._control, self._agents, self._watched = control, agents, watched
        self._notes, self._in_memory = 0, spec.upper is None
        self._next_watch = 0.0
        self._runner = CommandRunner(control, self._make_room)
        self._room = GradingRoom(spec, monitor, note=self._note, reap=self._runner.reap, sweep=self._sweep)

    def run(self) -> None:
        """Serve until end-of-file on the control socket."""
        woken = spawn.wake_on_children()
        self._runner.send(m.Ready())
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(woken, select.POLLIN)
        if self._agents is not None:
            poll.register(self._agents.socket, select.POLLRDHUP)
        while True:
            if time.monotonic() >= self._next_watch:  # not after each message
                self._watch()
            for fd, _ in poll.poll(self._left_ms()):
                if fd == woken:
                    os.read(fd, 4096)
                    self._runner.reap()
                elif fd != self._control.fileno() or not self._handle():
                    return  # nobody asks any more, or the agent's part has ended

    def _interval(self) -> int | None:
        if self._room.grading:
            return grading_room.INTERVAL_MS
        return memory_watch.INTERVAL_MS if self._watched else None

    def _left_ms(self) -> float | None:
        """Until the next watch; None where there is nothing to watch."""
        if self._interval() is None:
            return None
        return max(0.0, 1000 * (self._next_watch - time.monotonic()))

    def _watch(self) -> None:
        self._next_watch = time.monotonic() + (self._interval() or 0) / 1000
        if self._watched:
            pids = processes.others()
            spared = self._room.verifiers() if self._room.grading else ()
            self._note(memory_watch.enforce(self._room.memory_bytes, pids, spared, files=self._in_memory))
            self._room.bound_processes(len(pids))
        if self._room.grading:
            self._room.watch()

    def _note(self, text: str) -> None:
        """Tell of it; what keeps happening is told a few times."""
        if text and self._notes < _MOST_NOTES:
            self._notes += 1
            self._runner.send(m.Noted(text, sign=self._room.grading))

    def _handle(self) -> bool:
        packet, fds = m.receive(self._control, 3)
        if not packet:
            return False
        try:
            self._do(m.decode(packet), packet, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _do(self, message: m.Message, packet: bytes, fds: list[int]) -> None:
        match message:
            case m.Grading():
                self._grade(message)
            case m.Look(id):
                self._room.ask(grading_room.LOOK)
                self._runner.send(m.Ended(id, 0))
            case m.Listen(port, id):
                self._listen(port, id)
            case m.Command() if self._agents is None or self._room.grading:
                self._run(message, fds)
            case m.Kill(id) if self._runner.kill(id):
                pass
            case _ if self._agents is not None:
                self._agents.forward(packet, fds)

    def _listen(self, port: int, request: int) -> None:
        """Whoever asked serves the socket, outside; here nobody keeps it."""
        try:
            with socket.create_server(("127.0.0.1", port)) as listening:
                socket.send_fds(self._control, [m.encode(m.Listening())], [listening.fileno()])
        except OSError as error:
            self._runner.send(m.Failed(f"no socket at port {port} of the sandbox: {error}", request))
        else:
            self._runner.send(m.Ended(request, 0))

    def _run(self, command: m.Command, fds: list[int]) -> None:
        order = spawn.VERIFIERS_ORDER if self._room.grading else spawn.AGENTS_ORDER
        pid = self._runner.do(command, fds, order)
        if pid is not None and self._room.grading:
            self._room.sessions.add(pid)

    def _grade(self, message: m.Grading) -> None:
        self._next_watch = 0.0  # at once: what is watched, and how often, is another
        if message.begins:
            self._room.begin(kill=message.kill)
        else:
            self._room.end()
            self._room.ask(grading_room.MARK)
        self._runner.send(m.Ended(message.id, 0))

    def _make_room(self) -> None:
        if self._room.grading:
            self._room.kill_others("no process could be started")
            return
        self._sweep()
        self._note("no process could be started: everything else in the sandbox was killed")

    def _sweep(self) -> None:
        """Kill all that is the agent's as one: some processes fork faster than one looks."""
        if self._agents is not None:
            self._agents.sweep()
        elif not self._room.sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
