"""The key of the model endpoint, handed from the runner to the agent past everything that is written to disk.

Harbor writes an agent's keyword arguments to config.json, lock.json, result.json and trajectory.json, and its
environment variables into the sandbox. A context variable goes to neither.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_API_KEY: ContextVar[str | None] = ContextVar("harbortrainer_api_key", default=None)

NO_KEY = "EMPTY"


@contextmanager
def lend(key: str) -> Generator[None]:
    """Let the agent that is made inside this block read `key`."""
    token = _API_KEY.set(key)
    try:
        yield
    finally:
        _API_KEY.reset(token)


def api_key() -> str:
    """The key that was lent, else that of the process (OPENAI_API_KEY), else a placeholder."""
    return _API_KEY.get() or os.environ.get("OPENAI_API_KEY", NO_KEY)


def redact(folder: Path, secret: str) -> None:
    """Replace `secret` in every text file below `folder`. Blocks: run it in a thread."""
    needle = secret.encode()
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if needle in content and b"\0" not in content[:8192]:
            path.write_bytes(content.replace(needle, b"[REDACTED]"))
