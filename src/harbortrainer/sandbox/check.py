"""Whether this machine can run local sandboxes, found out by trying, and what is missing when it cannot."""

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from harbortrainer.errors import UserError
from harbortrainer.sandbox import masks
from harbortrainer.sandbox.errors import SandboxError
from harbortrainer.sandbox.guest import Guest


@dataclass(frozen=True)
class MissingTool:
    """A program that sandboxes need and that is not there, and the Debian package that has it."""

    name: str
    package: str


_TOOLS = (MissingTool("bash", "bash"), MissingTool("tar", "tar"), MissingTool("tmux", "tmux"))


def missing_tools(rootfs: Path = Path("/")) -> list[MissingTool]:
    """The programs that a root filesystem lacks: sandboxes run what they find in it (Terminus-2 drives tmux)."""
    folders = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin")
    path = os.pathsep.join(str(rootfs / folder) for folder in folders)
    return [tool for tool in _TOOLS if shutil.which(tool.name, path=path) is None]


async def problem() -> str | None:
    """Start a sandbox and run `true` in it. Returns why that fails, in words; None when it works."""
    try:
        guest = await Guest.start(minimal_spec(), await asyncio.to_thread(masks.plan, Path("/")))
        try:
            done = await guest.run(["/bin/sh", "-c", "true"])
        finally:
            await guest.stop()
    except SandboxError as error:
        return str(error)
    return None if done.code == 0 else f"`true` ended with code {done.code} in a sandbox"


def minimal_spec() -> dict:
    """A small sandbox on the host's root filesystem, without a network."""
    return {
        "rootfs": "/",
        "layer": None,
        "small": False,
        "binds": [],
        "upper": None,
        "disk_mb": 64,
        "inodes": 10_000,
        "dirs": [],
        "files": {},
        "hostname": "sandbox",
        "network": False,
        "memory_bytes": 512 << 20,
        "pids": 64,
        "cpu_us": None,
    }


def require() -> None:
    """Raise UserError when local sandboxes cannot run here: the packages to install, or the kernel's answer."""
    if missing := missing_tools():
        packages = " ".join(sorted({tool.package for tool in missing}))
        names = ", ".join(tool.name for tool in missing)
        raise UserError(f"local sandboxes need {names}", do=f"install with: apt-get install -y {packages}")
    if why := asyncio.run(problem()):
        raise UserError(
            f"local sandboxes do not start on this machine: {why}",
            do="run as root, or allow unprivileged user namespaces, or choose another environment_type",
        )
