"""Fork server: a small process that has imported everything, so that starting a sandbox costs one fork.

It runs until the process that started it closes the other end of its socket (standard input). Each packet carries
descriptors: a memory file with the message (a `HostView` or a `SandboxSpec`), and the sandbox's control socket.

At its start it runs the code of a sandbox a few times (`prewarm`). The interpreter specializes and caches code as it
runs, and all sandboxes then share those memory pages instead of copying them.

Invariant: `prewarm` changes nothing outside its folder and starts, signals and ends no process.
"""

import contextlib
import gc
import os
import signal
import socket
from dataclasses import replace

from harbortrainer.sandbox.inside import cgroups, commands, file_calls, filesystem, mask_layers, processes, seccomp
from harbortrainer.sandbox.inside import messages as m
from harbortrainer.sandbox.inside.commands import CommandRunner
from harbortrainer.sandbox.inside.messages import HostView, SandboxSpec, decode
from harbortrainer.sandbox.inside.monitor import Monitor
from harbortrainer.sandbox.inside.overlay_diff import UpperLayer
from harbortrainer.sandbox.inside.syscalls import set_arguments

_ROUNDS = 3  # further rounds do not make the code faster


def prewarm(folder: str) -> None:
    """Run the code that every sandbox runs, in a folder that is created and removed."""
    for _ in range(_ROUNDS):
        os.makedirs(f"{folder}/upper/root")
        _write(f"{folder}/upper/root/file")
        _prewarm_calls(folder)
        _prewarm_diff(folder)
        processes.session_id(os.getpid())
        processes.count_threads(os.getpid())
        for filtered in (False, True):
            seccomp.build_filter(allow_memfd=filtered)
        file_calls.empty_folders([], "", folder)
        os.rmdir(folder)


def _prewarm_calls(folder: str) -> None:
    """Send calls as the trainer's process does, and execute them as an init process does."""
    client, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    runner = CommandRunner(server, free_processes=lambda: None)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    archive = os.memfd_create("prewarm", os.MFD_CLOEXEC)
    upper = f"{folder}/upper"
    calls = [
        ["pack", upper, str(1 << 20)],
        ["unpack", f"{folder}/new"],
        ["empty", "777", f"{folder}/new"],
        ["is", "d", upper],
        ["executable", f"{upper}/root/file"],
    ]
    for call in calls:
        os.lseek(archive, 0, os.SEEK_SET)
        socket.send_fds(client, [m.encode(m.Command(call, call=True))], [archive, archive, null])
        packet, fds = m.receive(server, 3)
        command = m.decode(packet)
        assert isinstance(command, m.Command)
        runner.execute(replace(command, id=0), fds, commands.AGENT_OOM_SCORE)
        m.decode(m.receive(client, 1)[0])
        for fd in fds:
            os.close(fd)
    filesystem.copy_tree(upper, f"{folder}/new")
    commands.find_user("0")
    for fd in (null, archive):
        os.close(fd)
    client.close()
    server.close()


def _prewarm_diff(folder: str) -> None:
    """List the changed files, as a monitor does."""
    disk = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    layer = UpperLayer(m.SandboxSpec(), None, disk)
    layer.mark()
    _write(f"{folder}/upper/root/file")
    m.encode(layer.changes())
    os.close(disk)


def _write(path: str) -> None:
    with open(path, "w") as file:
        file.write(".")


def main(owner: int) -> None:
    """Serve until the other end closes. Running sandboxes continue; each has its own socket.

    Args:
        owner: Id of the process that started this one. It appears in the process list, also for each sandbox.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one handles Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=0)
    gc.disable()
    privileged = os.geteuid() == 0
    cgroups.remove_stale()
    mask_layers.enter_namespace(privileged=privileged)
    prewarm(mask_layers.layer_path("prewarm"))
    gc.freeze()  # the collector would write to pages that the sandboxes share
    views: dict[str | None, HostView] = {}
    while True:
        packet, fds, _, _ = socket.recv_fds(requests, 1, 2)
        if not packet:
            return
        with os.fdopen(fds[0], "rb") as file:
            message = decode(file.read())
        if isinstance(message, HostView):
            mask_layers.build(message, privileged=privileged)
            views[message.key] = message
        elif isinstance(message, SandboxSpec):
            if os.fork() == 0:
                _sandbox(message, views.get(message.view), fds[1], privileged, owner)
            os.close(fds[1])


def _sandbox(spec: SandboxSpec, view: HostView | None, fd: int, privileged: bool, owner: int) -> None:
    try:
        os.setsid()
        set_arguments(f"{m.SANDBOX_TITLE} {owner} {spec.name}")
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        keep = {0, 1, 2, fd}
        for number in os.listdir("/proc/self/fd"):
            if int(number) not in keep:
                with contextlib.suppress(OSError):
                    os.close(int(number))
        Monitor(spec, view, socket.socket(fileno=fd), privileged=privileged).run()
    finally:
        os._exit(0)
