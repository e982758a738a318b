"""The sandbox's init process: starts commands on request, reaps ended processes, and exits when its socket closes.

It receives `Command`, `Kill`, `Grading`, `ReportChanges` and `Listen`. It sends `Ready` once, then `Ended` or `Failed`
for each request, and `Note`. If the agent has its own namespaces, requests outside grading are forwarded to the init
process of those.

Invariant: when this process ends, the kernel kills every other process of the sandbox.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import time

from harbortrainer.sandbox.inside import commands, grading_limits, processes, seccomp
from harbortrainer.sandbox.inside import messages as m
from harbortrainer.sandbox.inside import syscalls as k
from harbortrainer.sandbox.inside.agent_namespace import AgentNamespace
from harbortrainer.sandbox.inside.commands import CommandRunner
from harbortrainer.sandbox.inside.grading_limits import GradingLimits

# chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, sys_chroot, setfcap
_KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 18, 31})
_MAX_NOTES = 20


def drop_privileges(spec: m.SandboxSpec, limited_controllers: list[str], name: str) -> None:
    """Drop all privileges that the sandbox does not need, for this process and its children.

    Args:
        limited_controllers: The cgroup controllers that enforce the limits.
        name: The new name of this process.
    """
    _set_rlimits(spec, limited_controllers)
    allow_memfd = "memory" in limited_controllers
    if spec.in_place:  # RUN may use sudo; without no-new-privileges only a privileged process may apply the filter
        seccomp.apply(allow_memfd=allow_memfd)
    k.keep_capabilities(_KEPT_CAPABILITIES)
    if not spec.in_place:
        k.no_new_privileges()
        seccomp.apply(allow_memfd=allow_memfd)
    # When memory runs out, the kernel kills the commands first and this process last.
    commands.protect_from_oom()
    k.hide_arguments(name)
    k.hide_memory()
    os.umask(0o022)


def _set_rlimits(spec: m.SandboxSpec, limited_controllers: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(65536, hard), min(65536, hard)))
    if "pids" not in limited_controllers:
        resource.setrlimit(resource.RLIMIT_NPROC, (spec.pids, spec.pids))
    if "memory" not in limited_controllers:
        resource.setrlimit(resource.RLIMIT_DATA, (spec.memory_bytes, spec.memory_bytes))


class InitProcess:
    """Event loop of the init process. Single-threaded: it only starts, reaps and kills processes.

    Args:
        monitor: The socket to the monitor outside, which may raise the limits.
        agent: The agent's namespaces; None if the agent's commands run in this process's.
        enforce_limits: Whether this process enforces the memory and process limits, because no control group does.
    """

    def __init__(
        self,
        spec: m.SandboxSpec,
        control: socket.socket,
        monitor: socket.socket,
        agent: AgentNamespace | None,
        *,
        enforce_limits: bool,
    ) -> None:
        self._control, self._agent, self._enforces_limits = control, agent, enforce_limits
        self._has_verifier_root = spec.has_verifier_root
        self._notes, self._files_in_memory = 0, not spec.builds_image
        self._next_check = 0.0
        self._runner = CommandRunner(control, self._free_processes)
        self._limits = GradingLimits(
            spec, monitor, note=self._note, reap=self._runner.reap, kill_agent=self._kill_agent_processes
        )

    def run(self) -> None:
        """Serve until end-of-file on the control socket."""
        wakeup = commands.open_child_wakeup()
        self._runner.send(m.Ready())
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        if self._agent is not None:
            poll.register(self._agent.socket, select.POLLRDHUP)
        while True:
            if time.monotonic() >= self._next_check:  # not after each message
                self._check_limits()
            for fd, _ in poll.poll(self._poll_timeout_ms()):
                if fd == wakeup:
                    os.read(fd, 4096)
                    self._runner.reap()
                elif fd != self._control.fileno() or not self._handle():
                    return  # the control socket or the agent's init process is closed

    def _interval_ms(self) -> int | None:
        if self._limits.grading:
            return grading_limits.INTERVAL_MS
        return processes.INTERVAL_MS if self._enforces_limits else None

    def _poll_timeout_ms(self) -> float | None:
        """Return the milliseconds until the next check of the limits; None if none is needed."""
        if self._interval_ms() is None:
            return None
        return max(0.0, 1000 * (self._next_check - time.monotonic()))

    def _check_limits(self) -> None:
        self._next_check = time.monotonic() + (self._interval_ms() or 0) / 1000
        if self._enforces_limits:
            pids = processes.other_pids()
            protected = self._limits.grading_pids() if self._limits.grading else ()
            self._note(
                processes.enforce_memory_limit(self._limits.memory_bytes, pids, protected, files=self._files_in_memory)
            )
            self._limits.enforce_process_limit(len(pids))
        if self._limits.grading:
            self._limits.watch()

    def _note(self, text: str) -> None:
        """Send a note, at most `_MAX_NOTES` in total."""
        if text and self._notes < _MAX_NOTES:
            self._notes += 1
            self._runner.send(m.Note(text, is_evidence=self._limits.grading))

    def _handle(self) -> bool:
        packet, fds = m.receive(self._control, 3)
        if not packet:
            return False
        try:
            self._dispatch(m.decode(packet), packet, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _dispatch(self, message: m.Message, packet: bytes, fds: list[int]) -> None:
        match message:
            case m.Grading():
                self._grade(message)
            case m.ReportChanges(id):
                self._limits.request(grading_limits.REPORT_CHANGES)
                self._runner.send(m.Ended(id, 0))
            case m.Listen(port, id):
                self._listen(port, id)
            case m.Command() if self._agent is None or self._limits.grading:
                self._start_command(message, fds)
            case m.Kill(id) if self._runner.runs(id):
                if self._limits.grading:  # the verifier's time is up
                    self._limits.request(grading_limits.REPORT_WAITS)
                self._runner.kill(id)
            case _ if self._agent is not None:
                self._agent.forward(packet, fds)

    def _listen(self, port: int, request: int) -> None:
        """Open a listening socket in the sandbox and send it to the requester, which serves it outside."""
        try:
            with socket.create_server(("127.0.0.1", port)) as listening:
                socket.send_fds(self._control, [m.encode(m.Listening())], [listening.fileno()])
        except OSError as error:
            self._runner.send(m.Failed(f"cannot listen on port {port} of the sandbox: {error}", request))
        else:
            self._runner.send(m.Ended(request, 0))

    def _start_command(self, command: m.Command, fds: list[int]) -> None:
        oom_score = commands.VERIFIER_OOM_SCORE if self._limits.grading else commands.AGENT_OOM_SCORE
        pid = self._runner.execute(command, fds, oom_score)
        if pid is not None and self._limits.grading:
            self._limits.grading_sessions.add(pid)

    def _grade(self, message: m.Grading) -> None:
        self._next_check = 0.0  # check at once: the limits and the interval change
        if message.begins:
            self._limits.begin(kill=message.kill)
            if self._has_verifier_root and not self._limits.request(grading_limits.SHOW_AGENT_FILES):
                self._runner.send(m.Failed("the verifier cannot be shown the agent's files", message.id))
                return
        else:
            self._limits.end()
            self._limits.request(grading_limits.MARK_START)
        self._runner.send(m.Ended(message.id, 0))

    def _free_processes(self) -> None:
        if self._limits.grading:
            self._limits.kill_leftovers("no process could be started")
            return
        self._kill_agent_processes()
        self._note("no process could be started: all other processes in the sandbox were killed")

    def _kill_agent_processes(self) -> None:
        """Kill all processes of the agent at once: some fork faster than /proc is read."""
        if self._agent is not None:
            self._agent.kill_all()
        elif not self._limits.grading_sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
