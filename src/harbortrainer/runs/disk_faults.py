"""One-line messages for disk errors of a run: disk full, read-only, or the run folder removed.

Contract: `disk_faults` turns an `OSError` about the run folder into a `RunStoppedError`; other errors pass unchanged.
Finished steps stay finished: `--resume` continues after them.
"""

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from harbortrainer.errors import RunStoppedError

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def disk_faults(folder: Path) -> Generator[None]:
    """Raise a disk error under the run folder `folder` as a one-line `RunStoppedError`."""
    try:
        yield
    except OSError as error:
        stopped = disk_error(error, folder)
        if stopped is None:
            raise
        raise stopped from error


def disk_error(error: OSError, folder: Path) -> RunStoppedError | None:
    """Return the error to raise for an `OSError` under `folder`; None if the error is unrelated."""
    file = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    if error.errno in FULL:
        return RunStoppedError(
            f"the disk of {folder} is full ({error.strerror})",
            do="free disk space and continue with --resume; finished steps are kept",
        )
    inside = file is not None and file.absolute().is_relative_to(folder)
    if inside and isinstance(error, FileNotFoundError):
        return folder_gone(folder)
    if inside:
        do = "fix that and continue with --resume"
        return RunStoppedError(f"cannot use {file}: {error.strerror}", do=do)
    return None


def folder_gone(folder: Path) -> RunStoppedError:
    """Return the error for a run folder that was removed during the run."""
    return RunStoppedError(
        f"the run folder {folder} was removed or moved during the run, with all finished steps",
        do="start the run again, or restore the folder and continue with --resume",
    )
