"""The transcript files of a run.

    transcripts/step_N.jsonl.gz        for rollouts/step_N.jsonl; eval_step_N.jsonl.gz for an evaluation
    transcripts/pending.jsonl(.gz)     rows and transcripts of ended trials that belong to no step yet

A trial's row has the place of its transcript: `"transcript": [offset, bytes]` in the file of the same name, or null.

Invariants: the file of a step is complete and is written before the rows that refer to it. A pending transcript is
written before its row, so that no row refers to a torn transcript. The files of steps stay under a size limit; the
oldest step's files are removed first, and the newest step's stay.
"""

import re
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from harbortrainer.runs.durable import line_of, write_whole
from harbortrainer.runs.transcript import Place, Transcript
from harbortrainer.runs.trial_row import TrialRow

FOLDER = "transcripts"
PENDING = "pending"
STEP_FILE = re.compile(r"(?:eval_)?step_(\d+)\.jsonl\.gz")
SUFFIX = ".jsonl.gz"


def transcript_place(name: str, at: Sequence[int]) -> Place:
    """Return the place `at` (offset and bytes) of a row of `rollouts/NAME.jsonl`."""
    return Place(f"{FOLDER}/{name}{SUFFIX}", at[0], at[1])


def read_transcript(folder: Path, place: Place, trial: str) -> Transcript | None:
    """Read the transcript of a trial; None if it was removed or replaced.

    Args:
        folder: Folder of the run or evaluation.
        place: Place of the transcript, from the trial's row.
        trial: Name of the trial, from its row.
    """
    try:
        with (folder / place.file).open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.length)
    except FileNotFoundError:
        return None
    found = Transcript.unpacked(content)
    return found if found is not None and found.trial == trial else None


def remove_after(folder: Path, step: int) -> None:
    """Remove the transcripts of trials after step `step` from the run in `folder`; these trials will run again."""
    for path in (folder / FOLDER).glob("*"):
        match = STEP_FILE.fullmatch(path.name)
        if match is None or int(match[1]) > step:
            path.unlink()


def append_member(path: Path, member: bytes) -> tuple[int, int]:
    """Append a gzip member to a file and return its offset and length."""
    with path.open("ab") as file:
        offset = file.tell()
        file.write(member)
    return offset, len(member)


class TranscriptWriter:
    """Writes the transcripts of a run; thread-safe.

    `add` never waits for `write`: it leaves its trial in a queue, which whoever has the lock empties.

    Args:
        folder: The run folder.
        max_mb: Size limit of all transcripts in megabytes; 0 writes none.
    """

    def __init__(self, folder: Path, *, max_mb: int) -> None:
        self.folder, self.most = folder / FOLDER, max_mb * 1_000_000
        self._pending: dict[str, tuple[bytes, TrialRow]] = {}
        self._added: deque[tuple[bytes, TrialRow]] = deque()
        """Trials that are in no file yet."""
        self._lock = threading.Lock()
        if self.most:
            self.folder.mkdir(exist_ok=True)

    def add(self, member: bytes, row: TrialRow) -> None:
        """Add an ended trial that is not assigned to a step yet.

        Args:
            member: The packed transcript; empty if there is none.
            row: The trial's row, without a step.
        """
        if not self.most or not member:
            return
        self._added.append((member, row))
        self._append_added()

    def write(self, name: str, rows: Iterable[TrialRow]) -> list[TrialRow]:
        """Write the transcripts of the trials of a step.

        Args:
            name: Name of the rows' file, without its suffix (`step_3`).
            rows: Rows of the trials.

        Returns:
            The rows with their `transcript` set. Write them after this call.
        """
        with self._lock:
            self._take_added()
            members, placed, offset = list[bytes](), list[TrialRow](), 0
            for row in rows:
                member, _ = self._pending.pop(row.trial, (b"", None))
                placed.append(row.model_copy(update={"transcript": (offset, len(member)) if member else None}))
                members.append(member)
                offset += len(member)
            if offset:
                write_whole(self.folder / f"{name}{SUFFIX}", b"".join(members))
            self._rewrite_pending()
            self._trim(f"{name}{SUFFIX}")
        self._append_added()
        return placed

    def _append_added(self) -> None:
        """Write the added trials, unless another thread has the lock: it does so before it returns."""
        while self._added and self._lock.acquire(blocking=False):
            try:
                self._append(self._take_added())
            finally:
                self._lock.release()

    def _take_added(self) -> list[tuple[bytes, TrialRow]]:
        """Move the added trials to the pending ones, and return them."""
        taken = [self._added.popleft() for _ in range(len(self._added))]
        self._pending |= {row.trial: (member, row) for member, row in taken}
        return taken

    def _append(self, entries: Iterable[tuple[bytes, TrialRow]]) -> None:
        """Append trials to the pending files."""
        placed = list[TrialRow]()
        with (self.folder / f"{PENDING}{SUFFIX}").open("ab") as file:
            for member, row in entries:
                placed.append(row.model_copy(update={"transcript": (file.tell(), len(member))}))
                file.write(member)
        with (self.folder / f"{PENDING}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(line_of(row.line()) for row in placed)

    def _rewrite_pending(self) -> None:
        for suffix in (".jsonl", SUFFIX):
            (self.folder / f"{PENDING}{suffix}").unlink(missing_ok=True)
        if self._pending:
            self._append(self._pending.values())

    def _trim(self, newest: str) -> None:
        """Remove the files of the oldest steps until the total is under the limit."""
        found = [(int(match[1]), path) for path in self.folder.glob("*") if (match := STEP_FILE.fullmatch(path.name))]
        sizes = {path: path.stat().st_size for _, path in found}
        total = sum(sizes.values())
        for _, path in sorted(found):
            if total <= self.most or path.name == newest:
                return
            path.unlink()
            total -= sizes[path]
