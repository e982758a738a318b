"""The runs and evaluations in a folder: a summary of each, and the comparison of two or more runs.

Contract: a run that cannot be read is a line with its error. A folder inside a run is not searched.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from harbortrainer.errors import UserError
from harbortrainer.estimates.interval import Estimate, mean_reward
from harbortrainer.estimates.paired import PairedDifference, paired_difference
from harbortrainer.view.charts import Mark, Series, for_both_widths, line_chart, sparkline
from harbortrainer.view.overview import Evaluations, all_rewards, evaluations_of, last_value, reward_marks, run_seconds
from harbortrainer.view.progress import progress_of_run
from harbortrainer.view.queries import IndexedRun
from harbortrainer.view.run_config import ConfigEntry, differences
from harbortrainer.view.run_folders import reader_of
from harbortrainer.view.trial_view import RunHead

DEPTH = 2
"""Levels of folders that are searched, as in `outputs/evaluations/base`."""
NO_CURVE = Markup("")
MAX_COMPARED = 6
"""Most runs in one comparison: more colours look alike."""


def find_runs(folder: Path) -> dict[str, Path]:
    """Return the run and evaluation folders below a folder, by relative path."""
    return {str(path.relative_to(folder)): path for path in _runs_below(folder, DEPTH)}


def _runs_below(folder: Path, depth: int) -> list[Path]:
    found: list[Path] = []
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []
    for path in inside:
        if reader_of(path) is not None:
            found.append(path)
        elif depth > 1:
            found += _runs_below(path, depth - 1)
    return found


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A line of the list."""

    name: str
    """Path relative to the folder."""
    head: RunHead | None
    """None if the run cannot be read."""
    error: str = ""
    curve: Markup = NO_CURVE
    steps: int = 0
    last_reward: float | None = None
    """Training reward of the last step."""
    evaluations: Evaluations | None = None
    """Evaluations of a run; None for an evaluation of its own."""
    estimate: Estimate | None = None
    """Mean reward of an evaluation of its own."""
    cost: float | None = None
    """Dollars of all steps so far, without evaluations; None without prices."""
    wall_s: float | None = None
    """Wall-clock seconds as on the run's page; of its steps alone if neither `live.json` nor a summary has them."""


class RunSet:
    """The runs in a folder. Indexes are opened when they are first needed, and stay open.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._open: dict[str, IndexedRun] = {}

    def names(self) -> list[str]:
        """Return the names of the runs that are there now."""
        return list(find_runs(self.folder))

    def run(self, name: str) -> IndexedRun:
        """Open a run of `names`."""
        if name not in self._open:
            path = self.folder / name
            reader = reader_of(path)
            if reader is None:
                raise UserError("is no longer a run", where=str(path), do="reload the list")
            self._open[name] = IndexedRun(path, reader)
        return self._open[name]

    def refresh(self) -> str:
        """Index what was written since the last call. Returns a stamp that changes with the data of any run."""
        stamps = "\n".join(f"{name} {self._stamp(name)}" for name in self.names())
        return hashlib.sha256(stamps.encode(errors="surrogateescape")).hexdigest()

    def _stamp(self, name: str) -> str:
        try:
            return self.run(name).refresh()
        except UserError as error:
            return str(error)

    def summary(self, name: str) -> RunSummary:
        """Return the line of a run."""
        try:
            store = self.run(name)
            store.refresh()
            return summary_of(name, store)
        except UserError as error:
            return RunSummary(name, None, str(error))


def summary_of(name: str, store: IndexedRun) -> RunSummary:
    """Return the line of a run or evaluation."""
    head, metrics = store.head(), store.metrics()
    if head.kind == "evaluation":
        return RunSummary(name, head, estimate=mean_reward(all_rewards(store)))
    marks = reward_marks(metrics)
    return RunSummary(
        name,
        head,
        curve=sparkline(marks, "Training reward by step"),
        steps=int(marks[-1].step) if marks else 0,
        last_reward=marks[-1].value if marks else None,
        evaluations=evaluations_of(store),
        cost=last_value(metrics, "cost/total"),
        wall_s=wall_seconds(store, time.time()),
    )


def wall_seconds(store: IndexedRun, now: float) -> float:
    """Return the wall-clock seconds of a run until `now`, in seconds since the epoch, or until its end."""
    progress, ended_s = progress_of_run(store, now), store.head().wall_s
    if progress is not None and progress.elapsed_s is not None:
        return progress.elapsed_s
    return sum(part.amount for part in run_seconds(store.metrics())) if ended_s is None else ended_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """Values of the template of a comparison."""

    runs: Sequence[RunSummary]
    training: Markup
    evaluated: Markup
    against_first: Sequence[PairedDifference | None]
    """Each run's last evaluation minus the first run's, over the tasks graded in both; None for the first."""
    differences: Sequence[ConfigEntry]
    """Keys in which the configs differ, with the value of each run."""


def compare(runs: RunSet, names: Sequence[str]) -> Comparison:
    """Compare training runs.

    Raises:
        UserError: A run cannot be read.
    """
    stores = [runs.run(name) for name in names]
    for store in stores:
        store.refresh()
    summaries = [summary_of(name, store) for name, store in zip(names, stores, strict=True)]
    last = [last_evaluation(store, one.evaluations) for store, one in zip(stores, summaries, strict=True)]
    trained = [reward_marks(store.metrics()) for store in stores]
    evaluated = [one.evaluations.marks if one.evaluations else [] for one in summaries]
    return Comparison(
        runs=summaries,
        training=_overlay(names, trained, "Training reward by step", dots=False),
        evaluated=_overlay(names, evaluated, "Evaluation reward by policy version", dots=True),
        against_first=[None, *(paired_difference(last[0], own) for own in last[1:])],
        differences=differences([store.config() for store in stores]),
    )


def last_evaluation(store: IndexedRun, found: Evaluations | None) -> Mapping[str, Sequence[float]]:
    """Return the rewards of a run's last evaluation, by task key."""
    return store.rewards("eval", found.steps[-1]) if found is not None and found.steps else {}


def _overlay(names: Sequence[str], marks: Sequence[Sequence[Mark]], label: str, *, dots: bool) -> Markup:
    named = [[named_mark(mark, name) for mark in own] for name, own in zip(names, marks, strict=True)]
    series = [
        Series(name, f"c{index}", own, dots) for index, (name, own) in enumerate(zip(names, named, strict=True), 1)
    ]
    return for_both_widths(lambda width: line_chart(series, label=label, width=width), 560)


def named_mark(mark: Mark, name: str) -> Mark:
    """Return a mark whose tooltip names its run."""
    return Mark(mark.step, mark.value, mark.low, mark.high, f"{name}: {mark.title}")
