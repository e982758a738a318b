"""What the pages ask of whoever reads a run, whatever it was made by."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from harbortrainer.view.shown_trial import Cell, RunHead, TrialEntry, TrialSheet
from harbortrainer.view.trial_filter import TrialFilter

type MetricRow = Mapping[str, object]


class TrialStore(Protocol):
    """One run, open for looking. Every call sees what was written up to the last `refresh`."""

    def refresh(self) -> str:
        """Read what was written since; returns a stamp that changes when anything did.

        Raises:
            UserError: A file of it cannot be read.
        """
        ...

    def head(self) -> RunHead:
        """What it is, and how it stands."""
        ...

    def metrics(self) -> Sequence[MetricRow]:
        """The lines of `metrics.jsonl`."""
        ...

    def found(self, wanted: TrialFilter) -> tuple[Sequence[TrialEntry], int]:
        """A page of the trials that are asked for, and how many there are in all."""
        ...

    def outcomes(self) -> Mapping[tuple[str, int], Mapping[str, int]]:
        """By kind and step, how many trials ended how."""
        ...

    def fates(self) -> Mapping[str, int]:
        """Of the training trials: how many trained (under `trained`), and why the others did not."""
        ...

    def seconds(self) -> Mapping[str, float]:
        """Seconds of all trials by phase, summed; `total` is whole trials."""
        ...

    def rewards(self, kind: str, step: int) -> Mapping[str, Sequence[float]]:
        """The rewards of the graded trials of one step, by task key."""
        ...

    def cells(self, kind: str) -> Mapping[tuple[str, int], Cell]:
        """By task and step, what became of it."""
        ...

    def choices(self) -> Mapping[str, Sequence[str]]:
        """The values of `outcome`, `source`, `task` and `trained` that occur, for the form of filters."""
        ...

    def group(self, group: str) -> Sequence[TrialEntry]:
        """The trials of one group, empty when there is none of that id."""
        ...

    def sheet(self, trial: str) -> TrialSheet | None:
        """One trial in full; None when there is none of that name."""
        ...
