"""The kinds of folders that can be looked at, and how each is read: a run, an evaluation, a run of Prime-RL."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from harbortrainer.errors import UserError
from harbortrainer.view.line_files import JsonLine
from harbortrainer.view.shown_trial import RunHead, TrialEntry, TrialSheet


class RunKind(Protocol):
    """How one kind of folder is read."""

    needs: frozenset[str]
    """What every line of a trial has; one without is another release's."""

    def trial_files(self, folder: Path) -> list[Path]:
        """The files with a line a trial, in the order of the run."""
        ...

    def metric_files(self, folder: Path) -> list[Path]:
        """The files with a line a step."""
        ...

    def line(self, row: JsonLine, file: Path) -> TrialEntry | None:
        """A trial's line; None when the row is about none."""
        ...

    def timings(self, row: JsonLine) -> Mapping[str, object]:
        """Seconds of each phase of the trial."""
        ...

    def sheet(self, folder: Path, line: TrialEntry, row: JsonLine) -> TrialSheet:
        """A trial in full."""
        ...

    def head(self, folder: Path) -> RunHead:
        """What the folder is, and how it stands."""
        ...


def need_folder(folder: Path) -> None:
    """Raise `UserError` when there is no folder."""
    do = "name the folder of a run (outputs/NAME) or of an evaluation"
    if not folder.exists():
        raise UserError("is not there", where=str(folder), do=do)
    if not folder.is_dir():
        raise UserError("is a file, not the folder of a run", where=str(folder), do=do)
