"""The machine: disk, system tools, ports."""

import asyncio
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from harbortrainer.config.preflight.facts import Facts
from harbortrainer.config.preflight.finding import Finding, green, red, yellow
from harbortrainer.sandbox.check import missing_tools, problem

GIB = 1024**3
LITTLE_GIB = {"docker": 20, "local": 2}
"""Free disk below this is told: images and trials of Docker, layers and trials of the local sandbox."""

RED_SHARE = 0.1
DOCKER_ROOT = Path("/var/lib/docker")


def check_disk(facts: Facts) -> Iterator[Finding]:
    """Room for trials, checkpoints and images."""
    yield disk("disk for the run", existing(facts.run_dir), LITTLE_GIB["local"])
    if "docker" in facts.environment_types and DOCKER_ROOT.is_dir():
        yield disk("disk for images", DOCKER_ROOT, LITTLE_GIB["docker"])


def disk(about: str, folder: Path, little_gib: float) -> Finding:
    """Free space of the disk that a folder lies on."""
    free = shutil.disk_usage(folder).free / GIB
    what = f"{free:.1f} GiB free at {folder}"
    if not os.access(folder, os.W_OK):
        return red(about, f"{folder} cannot be written to", "set output_dir to a folder of your own")
    if free < little_gib * RED_SHARE:
        return red(about, what, f"free {little_gib:g} GiB, or set output_dir elsewhere")
    if free < little_gib:
        return yellow(about, what, f"{little_gib:g} GiB are safer")
    return green(about, what)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def check_tools(facts: Facts) -> Iterator[Finding]:
    """What a local sandbox needs, found out by starting one."""
    if "local" not in facts.environment_types:
        return
    if missing := missing_tools():
        names, packages = ", ".join(tool.name for tool in missing), " ".join(tool.package for tool in missing)
        yield red("local sandbox", f"{names} not found", f"run `sudo apt-get install {packages}`")
    elif why := asyncio.run(problem()):
        yield red(
            "local sandbox", f"none can start here: {why}", 'see docs/sandbox.md, or set environment_type = "docker"'
        )
    else:
        yield green("local sandbox", "one started and ended")


def check_ports(facts: Facts) -> Iterator[Finding]:
    """Nobody else may listen where the run will."""
    ports = facts.ports
    taken = {name: port for name, port in ports.items() if not is_free(port)}
    for name, port in taken.items():
        yield red("ports", f"port {port} ({name}) is in use", "end what listens there, or set another port")
    if ports and not taken:
        yield green("ports", f"{', '.join(str(port) for port in ports.values())} free")


def is_free(port: int) -> bool:
    """Whether this process could listen on a port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
