"""The folder of an evaluation.

- `evaluation.json`: the policy, tasks and rules; a resume must have the same
- `trials.jsonl`: a row per trial, on disk before the next trial takes its slot
- `transcripts.jsonl.gz`: messages and tokens of each trial; the trial's row has the place
- `report.json`, `report.md`
- `config.json`, `result.json`, `<trial>/`: Harbor's job; `harbor view` opens the parent folder
- `set_aside/`: trial folders that do not count: failed, replaced or interrupted trials

Invariants: a row in `trials.jsonl` is never lost, even by `kill -9`. Of two rows of one attempt, the later counts. One
process writes here at a time.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from harbortrainer.errors import UserError
from harbortrainer.evaluation.eval_rules import EvalRules
from harbortrainer.runs.durable import append_line, repair, write_whole
from harbortrainer.runs.folder import first_difference_of
from harbortrainer.runs.locks import LOCK_FILE, RunLock, refuse_in_use
from harbortrainer.runs.transcript_files import append_member
from harbortrainer.runs.trial_row import TrialRow, read_rows
from harbortrainer.trials.outcome import Outcome

ABOUT, ROWS, TRANSCRIPTS, ASIDE = "evaluation.json", "trials.jsonl", "transcripts.jsonl.gz", "set_aside"


class EvalSpec(BaseModel):
    """The specification of an evaluation."""

    model_config = ConfigDict(extra="forbid")

    policy: str
    """Description of the evaluated policy."""
    identity: dict[str, str]
    """Fingerprints of the policy's files, or its server and name there."""
    tasks_dir: str
    """Folder of the tasks."""
    tasks: dict[str, str]
    """Content key of each task, by name."""
    attempts: int
    """Attempts per task; a resume may increase it."""
    rules: EvalRules
    """Rules of the trials: agent, sandbox, sampling, seed."""
    packages: dict[str, str] = {}
    """Package versions."""

    @property
    def keys(self) -> list[str]:
        """Content keys without duplicates; folders with equal content are one task."""
        return list(dict.fromkeys(self.tasks.values()))


class EvalFolder:
    """One evaluation on disk; `begin` opens it for writing, `read` for reading."""

    def __init__(self, path: Path, spec: EvalSpec) -> None:
        self.path, self.spec = path.absolute(), spec
        self.log = self.path / "log"
        self._lock: RunLock | None = None

    @classmethod
    def begin(cls, path: Path, spec: EvalSpec, *, resume: bool) -> Self:
        """Create the folder of a new evaluation, or open it to resume.

        Raises:
            UserError: The folder belongs to another evaluation, is in use, or exists without `resume`.
        """
        cls.checked(path, spec, resume=resume)
        folder = cls(path, spec)
        folder.log.mkdir(parents=True, exist_ok=True)
        folder._lock = RunLock(folder.path)
        write_whole(folder.path / ABOUT, spec.model_dump_json(indent=1) + "\n")
        repair(folder.path / ROWS)
        folder.cut_torn_transcript()
        folder.set_aside_uncounted()
        return folder

    @classmethod
    def checked(cls, path: Path, spec: EvalSpec, *, resume: bool) -> None:
        """Raise the errors that `begin` would raise, without writing anything."""
        refuse_in_use(path)
        if path.is_file():
            raise UserError("is a file", where=str(path), do="pass another folder with --out")
        there = path.is_dir() and any(entry.name != LOCK_FILE for entry in path.iterdir())
        if there and not resume:
            what = "an evaluation already exists here" if (path / ABOUT).is_file() else "this folder is not empty"
            do = "add --resume to continue it, or pass another folder with --out"
            raise UserError(what, where=str(path), do=do)
        if there:
            _refuse_different(path, cls.read(path).spec, spec)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the evaluation in a folder. Raises `UserError` if there is none."""
        file = path / ABOUT
        do = "pass a folder written by `harbortrainer eval --out`"
        try:
            return cls(path, EvalSpec.model_validate_json(file.read_bytes()))
        except OSError:
            raise UserError("no evaluation here", where=str(path), do=do) from None
        except ValidationError as error:
            raise UserError(f"cannot be read ({error.errors()[0]['msg']})", where=str(file), do=do) from None

    def add(self, row: TrialRow, transcript: bytes = b"") -> None:
        """Append a trial's row and transcript."""
        if transcript:
            at = append_member(self.path / TRANSCRIPTS, transcript)
            row = row.model_copy(update={"transcript": at})
        append_line(self.path / ROWS, row.line())

    def rows(self) -> list[TrialRow]:
        """Return the last trial of each attempt.

        Raises:
            UserError: A row cannot be read.
        """
        return list(self._latest().values())

    def all_rows(self) -> list[TrialRow]:
        """Return every trial. An attempt that was repeated has several."""
        return list(read_rows(self.path / ROWS))

    def _latest(self) -> dict[tuple[str, int], TrialRow]:
        file, latest = self.path / ROWS, dict[tuple[str, int], TrialRow]()
        for number, row in enumerate(read_rows(file), 1):
            if not row.task_key or row.attempt is None or row.outcome not in set(Outcome):
                what = "is not a trial of an evaluation: its task_key, attempt or outcome cannot be read"
                raise UserError(what, where=f"{file}: line {number}", do="remove that line")
            latest[row.task_key, row.attempt] = row
        return latest

    def graded(self) -> set[tuple[str, int]]:
        """Return task key and number of each graded attempt; these need not run again."""
        return {attempt for attempt, row in self._latest().items() if row.graded}

    def cut_torn_transcript(self) -> None:
        """Truncate what a kill left behind the last transcript with a row."""
        file = self.path / TRANSCRIPTS
        named = max((sum(row.transcript or ()) for row in read_rows(self.path / ROWS)), default=0)
        if file.is_file() and file.stat().st_size > named:
            os.truncate(file, named)

    def set_aside_uncounted(self) -> None:
        """Move folders of uncounted trials to `set_aside/`, so that Harbor's viewer shows the counted ones."""
        counted = {row.trial for row in self.rows() if row.graded}
        for folder in self.path.iterdir():
            ours = folder.name in (ASIDE, self.log.name) or folder.name in counted
            if folder.is_dir() and not ours and not folder.name.startswith("."):
                (self.path / ASIDE).mkdir(exist_ok=True)
                shutil.move(folder, self.path / ASIDE / folder.name)

    def release(self) -> None:
        """Release the lock on the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _refuse_different(path: Path, was: EvalSpec, now: EvalSpec) -> None:
    """Raise `UserError` if a resume would mix two different evaluations."""
    if now.attempts < was.attempts:
        what = f"this evaluation was started with -k {was.attempts}"
        raise UserError(what, where=str(path), do=f"resume it with -k {was.attempts} or more")
    difference = first_difference_of(_identity(was), _identity(now))
    if difference is not None:
        do = "resume with the options that it was started with, or pass another folder with --out"
        raise UserError(f"this folder belongs to another evaluation: {difference}", where=str(path), do=do)


def _identity(spec: EvalSpec) -> Mapping[str, object]:
    return spec.model_dump(mode="json", exclude={"attempts", "packages", "policy", "tasks_dir"})
