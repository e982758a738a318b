"""A small process that starts sandboxes: it has imported everything already, so that a sandbox costs one fork of it.

It lives as long as the process that started it holds the other end of its socket (standard input). With a packet come
descriptors: a file in memory with the message (a `HostView` or a `SandboxSpec`), and the sandbox's control socket.
"""

import contextlib
import gc
import os
import signal
import socket

from harbortrainer.sandbox.inside import cgroups, mask_layers, rehearsal
from harbortrainer.sandbox.inside.messages import HostView, SandboxSpec, decode
from harbortrainer.sandbox.inside.monitor import Monitor


def main(owner: int) -> None:
    """Serve until the other end closes. Sandboxes that were started live on; each has a socket of its own.

    Args:
        owner: The process that started this one. Only to be read from outside, in the list of processes.
    """
    del owner
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=0)
    gc.disable()
    privileged = os.geteuid() == 0
    cgroups.sweep()
    mask_layers.prepare(privileged=privileged)
    rehearsal.rehearse(mask_layers.path_of("rehearsal"))
    gc.freeze()  # what is shared with the sandboxes stays shared
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
                _sandbox(message, views.get(message.view), fds[1], privileged)
            os.close(fds[1])


def _sandbox(spec: SandboxSpec, view: HostView | None, fd: int, privileged: bool) -> None:
    try:
        os.setsid()
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
