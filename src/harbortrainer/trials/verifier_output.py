"""Reads the verifier's output before the trial's folder is removed.

An agent can write to the same folder, so no link is followed and no pipe is read.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from harbortrainer.trials import secrets

_STDOUT_FILE = "verifier/test-stdout.txt"
"""Harbor's file of the verifier's output, one per step."""
HEAD_CHARS, TAIL_CHARS = 1000, 3000
"""Characters kept of the beginning and the end of a long output."""
_MAX_BYTES = 1_000_000


def verifier_output(trial_dir: Path, *, steps: Sequence[str] = (), secret: str = "") -> str:
    """Return the verifier's output, with all steps in order; empty if there is none. Blocks: run it in a thread.

    Args:
        trial_dir: Harbor's folder of the trial.
        steps: The names of the task's steps, in order.
        secret: Text to redact.
    """
    folders = [trial_dir / "steps" / step for step in steps]
    found = [folder / _STDOUT_FILE for folder in [*folders, trial_dir]]  # not the agent's folders
    files = [path for path in found if path.exists() and not path.is_symlink()]
    printed = [(path.parent.parent.name if len(files) > 1 else "", _text(path).strip()) for path in files]
    text = "\n".join(f"[{step}]\n{output}" if step else output for step, output in printed if output)
    return shorten_output(secrets.redact_text(text, secret))


def shorten_output(text: str) -> str:
    """Return the text, or its beginning and end if it is long.

    Example:
        >>> shorten_output("short")
        'short'
    """
    left_out = len(text) - HEAD_CHARS - TAIL_CHARS
    return (
        text if left_out <= 0 else f"{text[:HEAD_CHARS]}\n... {left_out} characters left out ...\n{text[-TAIL_CHARS:]}"
    )


def _text(path: Path) -> str:
    """Return the beginning and end of a regular file; "" for anything else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return ""
        content = file.read(_MAX_BYTES)
        if status.st_size > _MAX_BYTES:
            file.seek(max(_MAX_BYTES, status.st_size - _MAX_BYTES))
            content += b"\n" + file.read(_MAX_BYTES)
    return content.decode("utf-8", "replace")
