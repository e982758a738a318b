"""The machine: what a local sandbox needs, and ports."""

import asyncio
import socket
from collections.abc import Iterator

from harbortrainer.doctor.finding import Finding, green, red
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.sandbox.probe import missing_tools, problem


def check_tools(plan: LaunchPlan) -> Iterator[Finding]:
    """What a local sandbox needs, found out by starting one."""
    where = plan.environment_types.get("local")
    if where is None:
        return
    if missing := missing_tools():
        do = f"run `sudo apt-get install {' '.join(missing)}`"
        yield red("local sandbox", f"{', '.join(missing)} not found", do, where)
    elif why := asyncio.run(problem()):
        do = 'see docs/sandbox.md, or set environment_type = "docker"'
        yield red("local sandbox", f"none can start here: {why}", do, where)
    else:
        yield green("local sandbox", "one started and ended")


def check_ports(plan: LaunchPlan) -> Iterator[Finding]:
    """Nobody else may listen where the run will."""
    taken = [(name, port, key) for name, port, key in plan.ports if not is_free(port)]
    for name, port, key in taken:
        do = "end what listens there, or set another port"
        yield red("ports", f"port {port} ({name}) is in use", do, plan.where(key))
    if plan.ports and not taken:
        yield green("ports", f"{', '.join(str(port) for _, port, _ in plan.ports)} free")


def is_free(port: int) -> bool:
    """Whether this process could listen on a port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
