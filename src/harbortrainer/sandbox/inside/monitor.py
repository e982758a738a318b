"""Monitor of one sandbox, outside its namespaces: starts its init process, waits for its end, removes its cgroups.

Invariant: the monitor's copy of the control socket closes last. The other end therefore reads end-of-file exactly when
no process of the sandbox is left.
"""

import contextlib
import os
import select
import signal
import socket

from harbortrainer.sandbox.inside import (
    agent_namespace,
    cgroups,
    file_waits,
    filesystem,
    grading_limits,
    init_process,
    processes,
    user_namespace,
    verifier_root,
)
from harbortrainer.sandbox.inside import syscalls as k
from harbortrainer.sandbox.inside.agent_namespace import AgentNamespace
from harbortrainer.sandbox.inside.messages import HOST_NAME, Changes, Failed, HostView, Note, SandboxSpec, send
from harbortrainer.sandbox.inside.overlay_diff import UpperLayer
from harbortrainer.sandbox.inside.slirp_network import SlirpNetwork

_ALL_USERS, _ONLY_ROOT = "0 0 4294967295\n", "0 0 1\n"
_MAX_WAITS = 3
_NAMESPACES = os.CLONE_NEWNS | os.CLONE_NEWIPC | os.CLONE_NEWUTS | os.CLONE_NEWCGROUP


class Monitor:
    """Runs the sandbox that `spec` describes."""

    def __init__(self, spec: SandboxSpec, view: HostView | None, control: socket.socket, *, privileged: bool) -> None:
        self._spec, self._view, self._control, self._privileged = spec, view, control, privileged
        self._id_map = _ALL_USERS if privileged else _ONLY_ROOT
        self._owner = user_namespace.unused_owner()
        self._groups: list[str] = []
        self._disk, self._increases = -1, 0
        self._verifier_root: list[int] = []
        """Descriptors of the grader's mount namespace and of the agent's root, if the verifier has its own root."""
        self._upper_layer: UpperLayer | None = None
        self._slirp: SlirpNetwork | None = None

    def run(self) -> None:
        """Run the sandbox to its end. Never raises: errors are sent as `Failed` on the control socket."""
        try:
            self._groups = [] if self._spec.in_place else cgroups.create(self._spec)
            self._run()
        except Exception as error:  # noqa: BLE001 (the process's last frame: the requester raises the error)
            self._send_failure(error)
        finally:
            if self._slirp is not None:
                self._slirp.close()
            cgroups.remove(self._groups)

    def _run(self) -> None:
        if self._spec.slirp4netns_path:
            self._slirp = SlirpNetwork(self._spec.slirp4netns_path)
        os.unshare(os.CLONE_NEWPID)
        here, there = socket.socketpair()
        child = os.fork()
        if child == 0:
            here.close()
            k.die_with_parent()
            self._run_child(there)
            os._exit(0)
        there.close()
        try:
            packet, fds, _, _ = socket.recv_fds(here, 1, 3)
            if packet:
                self._disk, *self._verifier_root = fds
                if self._spec.isolates_agent:
                    self._upper_layer = UpperLayer(self._spec, self._view, self._disk)
                    self._upper_layer.mark()
                for name in ("uid_map", "gid_map"):
                    k.write(f"/proc/{child}/{name}", self._id_map)
                if self._slirp is not None:
                    self._slirp.open(child)  # before any command can use the network
                here.send(b"m")
        except OSError as error:
            self._send_failure(error)
            os.kill(child, signal.SIGKILL)  # it still waits for its id maps
        self._wait(child, here)

    def _wait(self, child: int, requests: socket.socket) -> None:
        """Wait for the end of the init process; kill it when the other end of the control socket closes.

        Until then, serve its requests to raise the limits and to report changes.
        """
        ended = os.pidfd_open(child)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(self._control, select.POLLRDHUP | select.POLLHUP)
        poll.register(requests, select.POLLIN)
        ends = {ended, self._control.fileno()}
        if self._slirp is not None:
            poll.register(self._slirp.ended, select.POLLIN)
            ends.add(self._slirp.ended)
        while not ends & (ready := dict(poll.poll())).keys():
            if requests.fileno() in ready and not self._serve_request(requests, child):
                poll.unregister(requests)
        if self._slirp is not None:
            if self._slirp.ended in ready:
                self._send(Failed("slirp4netns, which connects the sandbox's network, has ended"))
            self._slirp.kill()
        if ended not in ready:
            os.kill(child, signal.SIGKILL)
        os.close(ended)
        os.waitpid(child, 0)
        if ended in ready and (killed := cgroups.count_oom_kills(self._groups)):
            self._send(Note(f"the sandbox ended at its own memory limit ({killed} processes killed by the kernel)"))

    def _serve_request(self, requests: socket.socket, child: int) -> bool:
        """Serve a request of the init process (see `grading_limits`). Return False at end of file."""
        request, answer = requests.recv(1), grading_limits.DONE
        if request == grading_limits.RAISE_LIMITS:
            self._raise_limits()
        elif request == grading_limits.REPORT_WAITS:
            self._send_waits(child)
        elif request == grading_limits.SHOW_AGENT_FILES:
            answer = grading_limits.DONE if self._show_agent_files() else grading_limits.REFUSED
        elif request and self._upper_layer is not None:
            self._send_changes() if request == grading_limits.REPORT_CHANGES else self._upper_layer.mark()
        if request:
            requests.send(answer)
        return bool(request)

    def _show_agent_files(self) -> bool:
        """Show the agent's files in the verifier's root, in a child that enters the mount namespace."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if not verifier_root.show_agent_files(*self._verifier_root, self._spec.work_dir):
                    self._send(
                        Note(f"a folder had more than {verifier_root.MAX_ENTRIES} files, which grading left out")
                    )
                code = 0
            except Exception as error:  # noqa: BLE001 - the process's last frame: the note names the error
                self._send(Note(f"could not show the verifier the agent's files: {error}", is_evidence=False))
            finally:
                os._exit(code)
        return os.waitpid(child, 0)[1] == 0

    def _send_changes(self) -> None:
        assert self._upper_layer is not None
        try:
            self._send(self._upper_layer.changes())
        except OSError as error:
            self._send(Note(f"could not read the agent's changes: {error}", is_evidence=False))

    def _send_waits(self, child: int) -> None:
        """Report the pipes of the agent that verifier processes wait for; the agent's have another namespace."""
        assert self._upper_layer is not None
        period = self._upper_layer.agent_period
        for text in file_waits.describe_waits(file_waits.descendants(child), period)[:_MAX_WAITS]:
            self._send(Note(text))

    def _raise_limits(self) -> None:
        """Raise the limits once more for grading."""
        if self._upper_layer is not None:
            self._upper_layer.mark_grading()
        self._increases += 1
        spec, more = self._spec, self._increases
        try:
            k.reconfigure(self._disk, filesystem.disk_options(spec, more))
            memory = spec.memory_bytes + (more * (grading_limits.EXTRA_MEMORY_MB + grading_limits.EXTRA_DISK_MB) << 20)
            processes = spec.pids + more * grading_limits.EXTRA_PROCESSES
            cgroups.raise_limits(self._groups, {"memory": memory, "pids": processes})
        except OSError as error:
            self._send(Note(f"could not raise the limits for grading: {error}"))

    def _run_child(self, sync: socket.socket) -> None:
        try:
            # An image builder's step has no memory limit, as with any builder.
            limited_controllers = ["memory"] if self._spec.in_place else cgroups.join(self._groups)
            k.leave_session_keyring()
            os.unshare(_NAMESPACES | (0 if self._spec.network else os.CLONE_NEWNET))
            agent = agent_namespace.fork() if self._spec.isolates_agent else None
            if isinstance(agent, socket.socket):
                sync.close()
                self._run_agent_init(agent, limited_controllers)
            else:
                self._run_grader_init(sync, agent, limited_controllers)
        except Exception as error:  # noqa: BLE001 (the process's last frame: the requester raises the error)
            self._send_failure(error)

    def _run_grader_init(
        self, sync: socket.socket, agent: AgentNamespace | None, limited_controllers: list[str]
    ) -> None:
        proc, disk = self._enter()
        shared = [disk]
        if agent is not None:
            processes.INIT_PIDS.add(agent.pid)
            shared += filesystem.enter_grader_namespace(self._spec)
            agent.send_files_ready()
        # Last, so that the mounts and the network belong to a user namespace in which no process inside has rights.
        user_namespace.enter(self._owner)
        socket.send_fds(sync, [b"u"], shared)
        for fd in shared:
            os.close(fd)
        sync.recv(1)
        os.seteuid(0)
        # Only the agent's own user namespace may be created.
        k.write("sys/user/max_user_namespaces", "1" if agent else "0", folder=proc, needed=False)
        if agent is not None:
            agent.send_user_namespace(proc)
        else:
            user_namespace.limit_counters(proc, self._owner)
        init_process.drop_privileges(self._spec, limited_controllers, "init")
        if agent is not None:
            agent.write_user_maps(proc, self._id_map)
        os.close(proc)
        enforce_limits = "memory" not in limited_controllers
        init_process.InitProcess(self._spec, self._control, sync, agent, enforce_limits=enforce_limits).run()

    def _enter(self) -> tuple[int, int]:
        """Enter the filesystem, and set the host name, network and sysctls. Return the descriptors of `enter`."""
        proc, disk = filesystem.enter(self._spec, self._view, privileged=self._privileged)
        socket.sethostname(HOST_NAME)
        if not self._spec.network:
            k.bring_loopback_up()
            k.write("sys/net/ipv4/ip_unprivileged_port_start", "0", folder=proc, needed=False)
        with contextlib.suppress(OSError):  # bounds the kernel memory of message queues; older kernels refuse
            k.write("sys/kernel/msgmni", "256", folder=proc, needed=False)
        return proc, disk

    def _run_agent_init(self, requests: socket.socket, limited_controllers: list[str]) -> None:
        agent_namespace.enter(requests, self._spec, self._owner)
        init_process.drop_privileges(self._spec, limited_controllers, "agent-init")
        agent_namespace.AgentInitProcess(requests, self._control).run()

    def _send_failure(self, error: Exception) -> None:
        self._send(Failed(f"{type(error).__name__}: {error}"))

    def _send(self, message: Failed | Note | Changes) -> None:
        with contextlib.suppress(OSError):
            send(self._control, message)
