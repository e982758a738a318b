"""A private folder for Unix sockets, removed when the process that created it ends.

Contract: only this user can open the folder (mode 0700), and its path is short enough. A helper shell waits for
end-of-file and removes the folder however this process ends, including SIGKILL.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

from harbortrainer.errors import UserError

MAX_SOCKET_PATH = 107
"""Characters of a Unix socket's path (sun_path of unix(7), without the final zero)."""


class SocketFolder:
    """A new folder below the temporary folder.

    Args:
        prefix: Beginning of its name.
        name_length: Characters of the longest name in it, with the slash.

    Raises:
        UserError: A socket's path would be too long.
    """

    def __init__(self, prefix: str, *, name_length: int) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        if len(str(self.path)) + name_length > MAX_SOCKET_PATH:
            self.path.rmdir()
            raise UserError(
                "path is too long for a Unix socket", where=str(self.path), do="set TMPDIR to a shorter path"
            )
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; rm -rf -- "$1"', "sh", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in the terminal must not reach it.
            start_new_session=True,
        )

    def remove(self) -> None:
        """Remove the folder now. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        # Closing the pipe is not enough: a process forked since may hold it too.
        self._remover.kill()
        self._remover.wait()
        assert self._remover.stdin is not None
        self._remover.stdin.close()
