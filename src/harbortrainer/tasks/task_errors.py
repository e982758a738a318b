"""Errors of one task among many: each place that reads tasks in a loop reports them by task and goes on.

Task folders are untrusted. Harbor, tarfile, tomllib, yaml and pathlib raise nearly anything over crafted ones.
"""

import errno
import os
import stat
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.sandbox.environment_types import EnvironmentChoice, choose_environment
from harbortrainer.sandbox.task_requirements import TaskRequirements

if TYPE_CHECKING:
    from harbortrainer.tasks.task_folder import TaskRef

MACHINE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EROFS}
"""Errors of this machine, which no other task would avoid."""
MAX_TEXT_BYTES = 16 << 20
"""Largest file that is read as text."""


@contextmanager
def reading_task(folder: Path | str) -> Generator[None]:
    """Turn whatever the block raises over one task's files into a `UserError` that names the task.

    Args:
        folder: The task's folder, or its name.

    Raises:
        UserError: The block failed on this task.
        OSError: The machine failed: its disk is full, or too many files are open.
    """
    try:
        yield
    except (UserError, RunStoppedError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
            raise
        do = "correct the task's files, or exclude it by name"
        raise UserError(f"cannot be read: {describe(error)}", where=str(folder), do=do) from error


def describe(error: Exception) -> str:
    """Describe an exception in one short line: its type, its message, and our or Harbor's line that raised it.

    Example:
        >>> describe(KeyError("a"))
        "KeyError: 'a'"
    """
    what = " ".join(str(error).split())[:300]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "harbor" in frame.filename]
    place = f" ({'/'.join(Path(frames[-1].filename).parts[-2:])}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' if what else ''}{what}{place}"


def read_text(path: Path) -> str:
    """Read a UTF-8 file; CRLF becomes LF. Never waits for a pipe, and never reads an endless device.

    Raises:
        OSError, UnicodeDecodeError: It is not a regular file of at most `MAX_TEXT_BYTES`, or not UTF-8.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > MAX_TEXT_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_TEXT_BYTES >> 20} MB", str(path))
        data = b"".join(iter(lambda: os.read(handle, status.st_size + 1), b""))
        return data[:MAX_TEXT_BYTES].decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    finally:
        os.close(handle)


def inspected(
    tasks: Iterable["TaskRef"],
    environment_type: str,
    kwargs: Mapping[str, object],
    skip: Callable[["TaskRef", UserError], object] = lambda task, error: None,
) -> Iterator[tuple["TaskRef", EnvironmentChoice, TaskRequirements]]:
    """Yield each task with its environment and requirements.

    Args:
        tasks: The tasks.
        environment_type: Their environment type, or `auto`.
        kwargs: The environment's options.
        skip: Called with each task whose files cannot be inspected, and with the error; the task is left out.
    """
    for task in tasks:
        try:
            with reading_task(task.path):
                found = choose_environment(task.path, environment_type, kwargs), TaskRequirements(task.path)
        except UserError as error:
            skip(task, error)
            continue
        yield task, *found
