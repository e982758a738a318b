"""One sandbox, from outside its namespaces: start its first process, wait for its end, remove its control groups.

Invariant: the monitor's copy of the control socket closes last, so that its other end reads end-of-file exactly when
nothing of the sandbox is left.
"""

import contextlib
import json
import os
import select
import signal
import socket
from typing import Any

from harbortrainer.sandbox.inside import cgroups, init, mounts
from harbortrainer.sandbox.inside import kernel as k

_EVERYBODY, _ONLY_ROOT = "0 0 4294967295\n", "0 0 1\n"
_SPACES = os.CLONE_NEWNS | os.CLONE_NEWIPC | os.CLONE_NEWUTS | os.CLONE_NEWCGROUP


def run(spec: dict[str, Any], plan: dict[str, Any] | None, control: socket.socket, *, privileged: bool) -> None:
    """Run the sandbox to its end. Never raises: what goes wrong is sent as {"error": ...} on the control socket."""
    groups: list[str] = []
    try:
        groups = cgroups.create(spec)
        _run(spec, plan, control, groups, privileged)
    except Exception as error:  # noqa: BLE001 (a process's last frame: whoever asked for the sandbox raises it)
        _tell(control, error)
    finally:
        cgroups.remove(groups)


def _run(
    spec: dict[str, Any], plan: dict[str, Any] | None, control: socket.socket, groups: list[str], privileged: bool
) -> None:
    os.unshare(os.CLONE_NEWPID)
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        here.close()
        k.die_with_parent()
        _first_process(spec, plan, control, groups, there, privileged)
        os._exit(0)
    there.close()
    with contextlib.suppress(OSError):
        if here.recv(1):
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{child}/{name}", "w") as file:
                    file.write(_EVERYBODY if privileged else _ONLY_ROOT)
            here.send(b"m")
    _wait(child, control)


def _wait(child: int, control: socket.socket) -> None:
    """Wait for the first process's end, which comes at the latest when the other end of the control socket closes.

    From here it can be killed whatever state it is in.
    """
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(control, select.POLLRDHUP | select.POLLHUP)
    if ended not in dict(poll.poll()):
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    os.waitpid(child, 0)


def _first_process(
    spec: dict[str, Any],
    plan: dict[str, Any] | None,
    control: socket.socket,
    groups: list[str],
    sync: socket.socket,
    privileged: bool,
) -> None:
    try:
        limited = cgroups.join(groups)
        k.own_keyring()
        os.unshare(_SPACES | (0 if spec["network"] else os.CLONE_NEWNET))
        proc = mounts.enter(spec, plan, privileged=privileged)
        socket.sethostname(spec["hostname"])
        if not spec["network"]:
            k.loopback_up()
        # Last, so that the mounts and the network belong to a user namespace that nothing inside has rights in.
        os.unshare(os.CLONE_NEWUSER)
        sync.send(b"u")
        sync.recv(1)
        sync.close()
        init.serve(spec, control, proc, limited)
    except Exception as error:  # noqa: BLE001 (the same)
        _tell(control, error)


def _tell(control: socket.socket, error: Exception) -> None:
    with contextlib.suppress(OSError):
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
