"""Sockets on which processes in a container reach this process.

There are two kinds:
- As root on the daemon's machine, the socket is opened on loopback in the container's network namespace. It works
  without a network, and only this container reaches it.
- Otherwise, it listens on the host at the bridge's address. Every container with a network reaches it.
"""

import asyncio
import os
import socket
import sys
from ipaddress import ip_network

from harbortrainer.config.environment_table import environment_entry
from harbortrainer.sandbox.docker_examination import docker
from harbortrainer.sandbox.errors_and_changes import SandboxError

LOOPBACK = "127.0.0.1"
_LOCAL_DAEMON = "unix://"
_MAKE = (
    "import socket, sys; listening = socket.create_server(('127.0.0.1', int(sys.argv[1]))); "
    "socket.send_fds(socket.socket(fileno=0), [b's'], [listening.fileno()])"
)
_TIMEOUT_S = 30.0


def can_listen_inside() -> bool:
    """Whether this process may enter a container's network namespace: as root, on the daemon's machine."""
    return os.geteuid() == 0 and os.environ.get("DOCKER_HOST", _LOCAL_DAEMON).startswith(_LOCAL_DAEMON)


async def listen_in(label: str, port: int) -> socket.socket:
    """Open a socket that listens on `port` of the loopback in the labelled container.

    Raises:
        SandboxError: No such container runs, or a process inside uses the port.
    """
    found = await docker("ps", "-q", "--filter", f"label={label}")
    inspected = await docker("inspect", "--format", "{{.State.Pid}}", *found.out.split()[:1])
    pid = inspected.out.strip()
    if not pid.isdigit() or pid == "0":
        raise SandboxError(f"no container with label {label} is running: {found.err or inspected.err}")
    here, there = socket.socketpair()
    with here, there:
        command = ("nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-I", "-S", "-c", _MAKE, str(port))
        making = await asyncio.create_subprocess_exec(*command, stdin=there.fileno(), stderr=asyncio.subprocess.PIPE)
        _, stderr = await asyncio.wait_for(making.communicate(), _TIMEOUT_S)
        if making.returncode:
            raise SandboxError(
                f"cannot listen on port {port} in the container: {stderr.decode(errors='replace')[-300:]}"
            )
        _, fds, _, _ = socket.recv_fds(here, 1, 1, socket.MSG_CMSG_CLOEXEC)
    return socket.socket(fileno=fds[0])


async def host_address(kind: str) -> tuple[str, str]:
    """Return the address to listen on for sandboxes of a kind, and the host name that they connect to.

    Both are the loopback, except for containers whose network this process may not enter.
    """
    if not environment_entry(kind).needs_docker or can_listen_inside():
        return LOOPBACK, LOOPBACK
    return await _bridge_address()


async def _bridge_address() -> tuple[str, str]:
    """Return the bridge's address twice.

    If the daemon runs in a virtual machine (Docker Desktop), return this machine's loopback and Docker's name for it.
    """
    form = "{{range .IPAM.Config}}{{.Gateway}} {{.Subnet}} {{end}}"
    inspected = await docker("network", "inspect", "bridge", "--format", form)
    for address in dict.fromkeys(map(_gateway, inspected.out.split())):
        try:
            with socket.create_server((address, 0)):
                return address, address
        except OSError:
            continue
    return LOOPBACK, "host.docker.internal"


def _gateway(address: str) -> str:
    """Return an address as it is, and of a subnet the first one.

    A freshly started Docker 20.10 reports only the subnet; its gateway is the first address.
    """
    return str(next(ip_network(address, strict=False).hosts())) if "/" in address else address
