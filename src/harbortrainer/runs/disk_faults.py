"""What a disk can do to a run, in one line: full, read-only, or the run's folder gone from under it.

Contract: inside of `disk_faults` an error of the operating system about the run's own folder comes out as
`RunStoppedError`, every other as it is. What was finished before stays finished: `--resume` goes on from there.
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
    """Tell an error of the disk under the run folder `folder` in one line."""
    try:
        yield
    except OSError as error:
        told = in_one_line(error, folder)
        if told is None:
            raise
        raise told from error


def in_one_line(error: OSError, folder: Path) -> RunStoppedError | None:
    """The message for an error under `folder`; None when it is about something else."""
    file = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    if error.errno in FULL:
        return RunStoppedError(
            f"the disk of {folder} is full ({error.strerror})",
            do="make room and go on with --resume; steps that were finished are kept",
        )
    inside = file is not None and file.absolute().is_relative_to(folder)
    if inside and isinstance(error, FileNotFoundError):
        return gone(folder)
    if inside:
        do = "mend that and go on with --resume"
        return RunStoppedError(f"cannot use {file}: {error.strerror}", do=do)
    return None


def gone(folder: Path) -> RunStoppedError:
    """The message for a run whose folder was removed while it ran."""
    return RunStoppedError(
        f"the run folder {folder} was removed or moved away while the run was going, and what it had finished with it",
        do="start the run again, or put the folder back and go on with --resume",
    )
