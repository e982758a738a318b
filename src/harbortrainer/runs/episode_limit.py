"""The size limit of a Prime-RL run's episodes, which our launcher keeps while `rl` runs.

A file is sealed (`sealed_files.py`) when its step is older than the newest two and it was not changed for an hour.
Prime-RL never reads these files, and appends to old ones in two cases only: a late trial of an evaluation, and
`retrigger_on_resume`. Such lines are joined with the sealed ones after a quiet minute. The oldest sealed files are
reduced to the trials' rows, until all are under the limit, as the embedded engine removes its oldest transcripts.

Invariants: a row is never removed. `kill -9` loses nothing. Nothing is changed before Prime-RL has written an episode
of this start: it deletes the folders of the steps that a resume repeats.
"""

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from harbortrainer.errors import UserError
from harbortrainer.runs.prime_rl_files import episode_of, is_reduced, reduced_episode, step_files
from harbortrainer.runs.sealed_files import open_lines, seal, sealed_path, write_sealed

CHECK_S = 60.0
QUIET_S = 3600.0
"""Seconds after which an unchanged file is sealed."""
PLAIN_STEPS = 2
"""The newest steps, whose files stay plain."""


class EpisodeLimit:
    """Keeps the episodes of a run under a limit.

    Args:
        run: The run folder.
        max_mb: Size limit of the sealed files in megabytes; 0 keeps the rows only.
    """

    def __init__(self, run: Path, *, max_mb: int) -> None:
        self._run, self._max_mb = run, max_mb
        self._started = time.time()
        self._reduced: set[Path] = set()
        self.ended = threading.Event()

    def check(self) -> None:
        """Seal old files, then reduce the oldest ones over the limit; stop after the current file once `ended` is set.

        A file that cannot be written now stays as it is.
        """
        files = step_files(self._run)
        plain = {path: time_s for _, path in files if (time_s := _changed_at(path)) is not None}
        if max(plain.values(), default=0.0) < self._started:
            return
        newest = max(step for step, _ in files)
        old = [path for step, path in files if step <= newest - PLAIN_STEPS]
        for path in old:
            quiet_s = CHECK_S if sealed_path(path).exists() else QUIET_S
            if path in plain and plain[path] < time.time() - quiet_s and not self.ended.is_set():
                with suppress(OSError, UserError):
                    seal(path)
        self.reduce()

    def reduce(self) -> None:
        """Reduce the oldest sealed files, while all are over the limit."""
        sealed = [path for _, path in step_files(self._run) if sealed_path(path).exists()]
        sizes = {path: sealed_path(path).stat().st_size for path in sealed}
        total = sum(sizes.values())
        for path in sealed:
            if total <= self._max_mb * 1_000_000 or self.ended.is_set():
                return
            if path not in self._reduced:
                with suppress(OSError, UserError):
                    self._reduce_file(path)
                    total += sealed_path(path).stat().st_size - sizes[path]
                self._reduced.add(path)

    def _reduce_file(self, path: Path) -> None:
        with open_lines(path) as lines:
            if is_reduced(episode_of(lines.readline())):
                return
            if not self._reduced:
                what = f"{self._run / 'rollouts'} has more than {self._max_mb} MB (transcripts_mb)"
                print(f"{what}: removing the transcripts of the oldest steps; their trials' rows stay", file=sys.stderr)
            lines.seek(0)
            write_sealed(path, (reduced_episode(line, path) for line in lines))


@contextmanager
def episodes_limited(run: Path, max_mb: int) -> Generator[None]:
    """Check the episodes of a run every `CHECK_S` seconds within the context."""
    limit = EpisodeLimit(run, max_mb=max_mb)

    def check() -> None:
        while not limit.ended.wait(CHECK_S):
            with suppress(OSError):  # a folder was removed meanwhile
                limit.check()

    thread = threading.Thread(target=check, daemon=True)
    thread.start()
    try:
        yield
    finally:
        limit.ended.set()
        thread.join()  # the next start of `rl` may delete folders


def _changed_at(path: Path) -> float | None:
    """Return the time of the last change of a plain file; None if it does not exist."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
