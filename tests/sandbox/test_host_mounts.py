"""Hosts that mount something below a folder that sandboxes see, as GPU machines mount their driver's folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harbortrainer.sandbox import host_view

SHELL = r"""
mount -t tmpfs none "$FOLDER" && cd "$FOLDER"
mkdir mounted folder && echo content > file && ln -s folder link && ln -s /nowhere dangling && mkfifo pipe
mount -t tmpfs none mounted && echo driver > mounted/driver
exec "$0" -c "$CODE"
"""
CODE = r"""
import asyncio, os, sys
from pathlib import Path
from harbortrainer.sandbox import host_view
from harbortrainer.sandbox.inside.messages import Command, SandboxSpec
from harbortrainer.sandbox.running_sandbox import RunningSandbox

async def run():
    sandbox = await RunningSandbox.start(SandboxSpec(), host_view.view_of(Path("/")))
    try:
        look = f"cd {os.environ['FOLDER']} && readlink link dangling; cat file mounted/driver; ls"
        return await sandbox.run(Command(["/bin/sh", "-c", look]))
    finally:
        await sandbox.stop()

done = asyncio.run(run())
sys.stdout.write(done.stdout.decode() + done.stderr.decode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_sandbox_starts_on_host_with_mount_in_shown_folder():
    variables = {"FOLDER": "/usr/local/src", "CODE": CODE, "PYTHONPATH": str(Path(host_view.__file__).parents[2])}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", SHELL, sys.executable],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    shown = [*("folder", "/nowhere"), *("content", "driver"), *("dangling", "file", "folder", "link", "mounted")]
    assert done.stdout.split() == shown, done.stderr
