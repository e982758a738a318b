"""A small process that starts sandboxes: it has imported everything already, so that a sandbox costs one fork of it.

It lives as long as the process that started it holds the other end of its socket (standard input). A packet is the
word `mask` or `sandbox` with descriptors: a file in memory with the JSON of it, and the sandbox's control socket.
"""

import contextlib
import gc
import json
import os
import signal
import socket
from typing import Any

from harbortrainer.sandbox.inside import cgroups, masking, monitor

_MAX_PACKET = 1 << 20


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
    gc.freeze()  # what is shared with the sandboxes stays shared
    privileged = os.geteuid() == 0
    cgroups.sweep()
    masking.prepare(privileged=privileged)
    plans: dict[str, dict[str, Any]] = {}
    while True:
        kind, fds, _, _ = socket.recv_fds(requests, _MAX_PACKET, 2)
        if not kind:
            return
        with os.fdopen(fds[0], "rb") as file:
            content = json.load(file)
        if kind == b"mask":
            masking.build(content, privileged=privileged)
            plans[content["key"]] = content
            continue
        if os.fork() == 0:
            _sandbox(content, plans.get(content["mask"] or ""), fds[1], privileged)
        os.close(fds[1])


def _sandbox(spec: dict[str, Any], plan: dict[str, Any] | None, fd: int, privileged: bool) -> None:
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
        monitor.run(spec, plan, socket.socket(fileno=fd), privileged=privileged)
    finally:
        os._exit(0)
