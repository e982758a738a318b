"""Test whether this machine can run local sandboxes, and what is missing if not."""

import asyncio
import shutil
from pathlib import Path

from harbortrainer.sandbox import host_view
from harbortrainer.sandbox.errors_and_changes import SandboxError
from harbortrainer.sandbox.inside.messages import Command, SandboxSpec
from harbortrainer.sandbox.running_sandbox import RunningSandbox

_TOOLS = ("bash", "tar", "tmux")


def missing_tools() -> list[str]:
    """Return the missing programs that sandboxes on this machine's root filesystem need; Terminus-2 needs tmux.

    Each is also the name of its Debian package.
    """
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]


async def problem() -> str | None:
    """Start a sandbox and run `true` in it. Returns why that fails, or None."""
    try:
        sandbox = await RunningSandbox.start(SandboxSpec(), await asyncio.to_thread(host_view.view_of, Path("/")))
        try:
            done = await sandbox.run(Command(["/bin/sh", "-c", "true"]))
        finally:
            await sandbox.stop()
    except SandboxError as error:
        return str(error)
    return None if done.code == 0 else f"`true` ended with code {done.code} in a sandbox"
