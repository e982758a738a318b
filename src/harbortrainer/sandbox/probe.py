"""Whether this machine can run local sandboxes, found out by trying, and what is missing when it cannot."""

import asyncio
import os
import shutil
from pathlib import Path

from harbortrainer.sandbox import host_view
from harbortrainer.sandbox.guest import Guest
from harbortrainer.sandbox.inside.messages import Command, SandboxSpec
from harbortrainer.sandbox.sandbox_errors import SandboxError

_TOOLS = ("bash", "tar", "tmux")


def missing_tools(rootfs: Path = Path("/")) -> list[str]:
    """The programs that a root filesystem lacks: sandboxes run what they find in it (Terminus-2 drives tmux).

    The Debian packages that have them bear their names.
    """
    folders = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin")
    path = os.pathsep.join(str(rootfs / folder) for folder in folders)
    return [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]


async def problem() -> str | None:
    """Start a sandbox and run `true` in it. Returns why that fails, in words; None when it works."""
    try:
        guest = await Guest.start(SandboxSpec(), await asyncio.to_thread(host_view.view_of, Path("/")))
        try:
            done = await guest.run(Command(["/bin/sh", "-c", "true"]))
        finally:
            await guest.stop()
    except SandboxError as error:
        return str(error)
    return None if done.code == 0 else f"`true` ended with code {done.code} in a sandbox"
