"""What the verifier of a trial printed, bounded, before the trial's folder goes.

An agent can write where the verifier writes, so nothing here follows a link or waits on a pipe.
"""

import os
import stat
from pathlib import Path

FILE = "test-stdout.txt"
"""Harbor's name for it, of each step."""
FIRST, LAST = 1000, 3000
"""Characters that are kept of a long one."""
_MOST_BYTES = 1_000_000


def verifier_output(trial_dir: Path, *, secret: str = "") -> str:
    """What was printed, of several steps one after the other; empty when nothing was. Blocks: run it in a thread.

    Args:
        trial_dir: Harbor's folder of the trial.
        secret: Replaced where it was printed.
    """
    files = sorted(path for path in trial_dir.rglob(FILE) if not path.is_symlink())
    told = [(path.parent.parent.name if len(files) > 1 else "", _text(path).strip()) for path in files]
    text = "\n".join(f"[{step}]\n{said}" if step else said for step, said in told if said)
    return bounded(text.replace(secret, "[REDACTED]") if secret else text)


def bounded(text: str) -> str:
    """The beginning and the end of a text.

    Example:
        >>> bounded("short")
        'short'
    """
    left_out = len(text) - FIRST - LAST
    return text if left_out <= 0 else f"{text[:FIRST]}\n... {left_out} characters left out ...\n{text[-LAST:]}"


def _text(path: Path) -> str:
    """Beginning and end of a plain file; nothing of what is none."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            return ""
        content = file.read(_MOST_BYTES)
        if about.st_size > _MOST_BYTES:
            file.seek(max(_MOST_BYTES, about.st_size - _MOST_BYTES))
            content += b"\n" + file.read(_MOST_BYTES)
    return content.decode("utf-8", "replace")
