"""The transcripts of a run on disk, while it goes on and afterwards.

    transcripts/step_N.jsonl.gz        of the trials in rollouts/step_N.jsonl; eval_step_N.jsonl.gz of an evaluation's
    transcripts/pending.jsonl(.gz)     lines and transcripts of the trials that ended since and are in no step yet

A trial's line names the place of its transcript: `"transcript": [offset, bytes]` in the file of the same name, null
where none was kept. Invariants: a file of a step is whole and is written before the lines that name it; a pending
transcript is written before its line, so that what a kill tears is never named; together the files of steps stay under
the bound, the oldest step's go first and the newest stays.
"""

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harbortrainer.runs.durable import line_of, write_whole
from harbortrainer.runs.trace_transcript import of_episode
from harbortrainer.runs.transcript import Place, Transcript

FOLDER = "transcripts"
PENDING = "pending"
STEP_FILE = re.compile(r"(?:eval_)?step_(\d+)\.jsonl\.gz")
SUFFIX = ".jsonl.gz"


def place_of(name: str, at: Sequence[int]) -> Place:
    """Where the transcript lies that a line of `rollouts/NAME.jsonl` names with `at` (offset and bytes)."""
    return Place(f"{FOLDER}/{name}{SUFFIX}", at[0], at[1])


def read(folder: Path, place: Place, trial: str) -> Transcript | None:
    """The transcript of a trial that lies there; None when it is kept no longer, or another's by now.

    Args:
        folder: Of the run or the evaluation.
        place: As its line names it; in a file that is not packed lies an episode of Prime-RL's.
        trial: The trial's name, as its line has it.
    """
    try:
        with (folder / place.file).open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.length)
    except FileNotFoundError:
        return None
    found = Transcript.unpacked(content) if place.file.endswith(SUFFIX) else of_episode(content)
    return found if found is not None and found.trial == trial else None


def forget_after(folder: Path, step: int) -> None:
    """Remove what the run in `folder` wrote of trials after step `step`; they will be played again."""
    for path in (folder / FOLDER).glob("*"):
        match = STEP_FILE.fullmatch(path.name)
        if match is None or int(match[1]) > step:
            path.unlink()


def append_member(path: Path, member: bytes) -> tuple[int, int]:
    """Put a member at the end of a file. Returns its offset and length."""
    with path.open("ab") as file:
        offset = file.tell()
        file.write(member)
    return offset, len(member)


class TranscriptBook:
    """Keeps the transcripts of a run that goes on. Safe to be used by several threads.

    Args:
        folder: Of the run.
        most_mb: Most megabytes of all transcripts; 0 keeps none.
    """

    def __init__(self, folder: Path, *, most_mb: int) -> None:
        self.folder, self.most = folder / FOLDER, most_mb * 1_000_000
        self._pending: dict[str, tuple[bytes, Mapping[str, object]]] = {}
        self._lock = threading.Lock()
        if self.most:
            self.folder.mkdir(exist_ok=True)

    def add(self, trial: str, member: bytes, line: Mapping[str, object]) -> None:
        """A trial ended; what becomes of it is not decided.

        Args:
            trial: Its name.
            member: Its transcript, packed; empty where there is none.
            line: What is known of it.
        """
        if not self.most or not member:
            return
        with self._lock:
            self._pending[trial] = member, line
            self._append(member, line)

    def write(self, name: str, rows: Iterable[Mapping[str, object]]) -> list[dict[str, object]]:
        """It was decided what becomes of these trials: write their transcripts.

        Args:
            name: Of the file of their lines, without its suffix (`step_3`).
            rows: Their lines, with the trial's name in `trial`.

        Returns:
            The lines, each with its `transcript`. They are to be written after this.
        """
        with self._lock:
            members, placed, offset = [], [], 0
            for row in rows:
                member, _ = self._pending.pop(str(row["trial"]), (b"", None))
                placed.append({**row, "transcript": [offset, len(member)] if member else None})
                members.append(member)
                offset += len(member)
            if offset:
                write_whole(self.folder / f"{name}{SUFFIX}", b"".join(members))
            self._start_pending_again()
            self._trim(f"{name}{SUFFIX}")
        return placed

    def _append(self, member: bytes, line: Mapping[str, object]) -> None:
        at = append_member(self.folder / f"{PENDING}{SUFFIX}", member)
        with (self.folder / f"{PENDING}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line_of({**line, "transcript": at}))

    def _start_pending_again(self) -> None:
        for suffix in (".jsonl", SUFFIX):
            (self.folder / f"{PENDING}{suffix}").unlink(missing_ok=True)
        for member, line in self._pending.values():
            self._append(member, line)

    def _trim(self, newest: str) -> None:
        """Remove the files of the oldest steps until the bound is kept."""
        found = [(int(match[1]), path) for path in self.folder.glob("*") if (match := STEP_FILE.fullmatch(path.name))]
        sizes = {path: path.stat().st_size for _, path in found}
        total = sum(sizes.values())
        for _, path in sorted(found):
            if total <= self.most or path.name == newest:
                return
            path.unlink()
            total -= sizes[path]
