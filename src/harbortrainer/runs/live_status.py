"""What an active run or evaluation is doing, in `live.json` of its folder; `harbortrainer view` reads it.

Contract: a thread writes the file when its content changed, at most once a second, and removes it at the end. A reader
must check that the process of the folder's lock runs: after `kill -9` the file stays. A file that cannot be written
does not disturb the run.
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

LIVE_FILE = "live.json"
INTERVAL_S = 1.0


class Phase(BaseModel):
    """A part of the work that is in progress; it may have an inner one."""

    model_config = ConfigDict(frozen=True)

    text: str
    since: float
    """Start, in seconds since the epoch."""
    done: int = 0
    total: int | None = None
    """Size of the part in steps or trials; None if it is unknown."""


class ActiveTrial(BaseModel):
    """A trial that has started and not ended."""

    model_config = ConfigDict(frozen=True)

    task: str
    since: float
    """Start, in seconds since the epoch."""


class LiveStatus(BaseModel):
    """Content of the file."""

    since: float = 0.0
    """Start of the run in seconds since the epoch; the time of earlier starts counts."""
    phases: list[Phase] = []
    """Phases in progress, the outermost first."""
    trials: list[ActiveTrial] = []

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the status in a folder; an empty one if there is no file, or a damaged one."""
        try:
            return cls.model_validate_json((folder / LIVE_FILE).read_bytes())
        except (OSError, ValidationError):
            return cls()


class LiveWriter:
    """Thread that writes the file while the context is open.

    Args:
        folder: Folder of the run or evaluation.
        status: Returns the status; called in the thread.
    """

    def __init__(self, folder: Path, status: Callable[[], LiveStatus]) -> None:
        self._file, self._status = folder / LIVE_FILE, status
        self._written = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._write_changes, name="live-status", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the thread and remove the file."""
        self._done.set()
        self._thread.join(timeout=5)
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _write_changes(self) -> None:
        while not self._done.is_set():
            with contextlib.suppress(OSError):  # a full disk or a removed folder is reported by the run itself
                self._write(self._status().model_dump_json())
            self._done.wait(INTERVAL_S)

    def _write(self, content: str) -> None:
        """Replace the file at once. It is not synced to disk, because it has no meaning after a crash."""
        if content == self._written:
            return
        draft = self._file.with_name(f".{LIVE_FILE}.part")
        draft.write_text(content, encoding="utf-8")
        draft.replace(self._file)
        self._written = content
