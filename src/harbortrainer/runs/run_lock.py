"""One run, one folder: the lock that a run holds on its folder for as long as it lives.

It is the kernel's lock on a file in it (`.lock`, or the name given), gone with the process that held it, `kill -9`
included. What the file says is only for the message of whoever is refused. Invariant: of two processes that open one
run folder, one is refused.
"""

import errno
import json
import os
from datetime import UTC, datetime
from pathlib import Path

from harbortrainer.errors import UserError
from harbortrainer.runs.file_lock import try_lock

LOCK_FILE = ".lock"
NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems answer that know no locks; a run there goes without."""


class RunLock:
    """The lock on one run folder.

    Args:
        folder: The run's.
        name: The lock's, below it; the folder that it lies in must be there.

    Raises:
        UserError: Another process holds it; says which.
    """

    def __init__(self, folder: Path, name: str = LOCK_FILE) -> None:
        self.path = folder / name
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            free = try_lock(self._file)
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                raise
            free = True
        if not free:
            self._file.close()
            raise in_use(folder, name)
        self._file.truncate(0)
        started = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
        self._file.write(json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "started": started}) + "\n")
        self._file.flush()

    @property
    def holds(self) -> bool:
        """Whether the folder is still the one that was locked: not removed, moved away or made anew."""
        ours = os.fstat(self._file.fileno())
        try:
            there = self.path.stat()
        except OSError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def release(self) -> None:
        """Let go of it."""
        self._file.close()


def refuse_in_use(folder: Path, name: str = LOCK_FILE) -> None:
    """Raise `UserError` when a living process holds the folder; nothing is written."""
    path = folder / name
    if not path.is_file():
        return
    with path.open("a", encoding="utf-8") as file:
        try:
            free = try_lock(file)
        except OSError as error:
            free = error.errno in NO_LOCKS_HERE
    if not free:
        raise in_use(folder, name)


def in_use(folder: Path, name: str) -> UserError:
    """The message for whoever comes second."""
    return UserError(
        f"another run is writing into this folder: {_holder(folder / name)}",
        where=str(folder),
        do="wait for its end, stop it, or choose another run.name",
    )


def _holder(path: Path) -> str:
    try:
        it = json.loads(path.read_text(encoding="utf-8"))
        return f"process {it['pid']} on {it['host']}, since {it['started']} UTC".replace("+00:00", "")
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has only just begun"
