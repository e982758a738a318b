"""A folder for the sockets of processes that are ended with this one.

Contract: it is this user's alone, its path is short, and it is gone when this process is, however that ends: a shell
that waits for end-of-file removes it.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path


class SocketRoom:
    """A folder among the temporary ones, from now on."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="vllm-"))
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; rm -rf -- "$1"', "sh", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # The terminal's Ctrl-C is not for it.
            start_new_session=True,
        )

    def remove(self) -> None:
        """Remove it now. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        # Not by closing the pipe: a process that was forked since may hold it too.
        self._remover.kill()
        self._remover.wait()
        assert self._remover.stdin is not None
        self._remover.stdin.close()
