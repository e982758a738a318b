"""Temporary folders of commands, which the next start removes if their process was killed."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from harbortrainer.runs.locks import NoLocksError, try_lock

_MARKER = ".harbortrainer-scratch"


@contextmanager
def scratch_folder(name: str) -> Generator[Path]:
    """Yield a new temporary folder, and remove it at the end. Folders of killed processes are removed first.

    Invariant: a folder has its marker only after its process has locked it, and the kernel ends the lock with the
    process. So a folder of a live process, of another user or of an older version is never removed.
    """
    prefix = f"harbortrainer-{name}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError, NoLocksError), _open_folder(left) as handle:
            own = os.fstat(handle).st_uid == os.geteuid() and (left / _MARKER).exists()
            if own and try_lock(handle):
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder, _open_folder(Path(folder)) as handle:
        with contextlib.suppress(NoLocksError):
            try_lock(handle)
            Path(folder, _MARKER).touch()
        yield Path(folder)


@contextmanager
def _open_folder(folder: Path) -> Generator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield handle
    finally:
        os.close(handle)
