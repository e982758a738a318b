"""SQL queries of the pages over a run's index, and the trial filter that is part of a page's address.

Invariants: every result reflects the last `refresh`; aggregates are cached until the next change. A broken index is
rebuilt from the run's files. `TrialFilter.read` and `TrialFilter.query` are inverse.
"""

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self, cast
from urllib.parse import quote, urlencode

from harbortrainer.errors import UserError
from harbortrainer.runs.trial_row import TrialRow
from harbortrainer.view.folder_reader import FolderReader, LineLocation, read_line
from harbortrainer.view.index import PHASES, MetricRow, RunIndex, open_index, remove, row_of
from harbortrainer.view.run_config import FlatConfig
from harbortrainer.view.trial_view import Cell, RunHead, TaskLabel, TrialDetail

PAGE = 50
"""Trials on a page of the list."""
SORTS = ("step", "reward", "advantage", "turns", "tokens", "seconds", "task", "outcome")
KINDS = ("train", "eval")


class AddressError(UserError):
    """An address with an invalid parameter."""


@dataclass(frozen=True, slots=True)
class TrialFilter:
    """Filter, order and page of a list of trials."""

    kind: str = ""
    """`train` or `eval`; empty for both."""
    task: str = ""
    """Task name."""
    source: str = ""
    """Source name."""
    outcome: str = ""
    """Outcome name."""
    step: str = ""
    """`3`, or a range `3..7`, `3..` or `..7`."""
    reward: str = ""
    """`1`, a range `0..0.5`, or `none` for trials without a reward."""
    trained: str = ""
    """`yes`, `no`, or a reason as the rows have it in `not_trained`."""
    group: str = ""
    """Group id."""
    sort: str = ""
    """A column of `SORTS`; `-` before it sorts in descending order. Empty: newest first."""
    page: int = 1

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Self:
        """Parse the parameters of an address; unknown parameters are ignored.

        Raises:
            AddressError: A value is invalid.
        """
        known = {field.name: query[field.name] for field in fields(cls) if query.get(field.name)}
        page = known.pop("page", "1")
        if not page.isascii() or not page.isdecimal() or int(page[:9]) == 0:
            raise AddressError(f"page {page[:40]!r} is not a positive number", do="use a number from 1")
        found = cls(**known, page=int(page[:9]))
        if found.sort.removeprefix("-") not in ("", *SORTS):
            raise AddressError(f"sort {found.sort[:40]!r} is not a column", do=f"use one of {', '.join(SORTS)}")
        if found.kind not in ("", *KINDS):
            raise AddressError(f"kind {found.kind[:40]!r} is unknown", do="use train or eval")
        _ = found.steps, found.rewards  # these raise for an invalid range
        return found

    @property
    def steps(self) -> tuple[float, float] | None:
        """First and last step; None for all steps."""
        return _range(self.step, "step")

    @property
    def rewards(self) -> tuple[float, float] | None:
        """Smallest and largest reward; None for all trials and for `none`."""
        return None if self.reward == "none" else _range(self.reward, "reward")

    def query(self, **change: object) -> str:
        """Return the address parameters with `change` applied; page 1 unless `change` sets it."""
        new = replace(self, **({"page": 1} | change))
        values = {field.name: getattr(new, field.name) for field in fields(new)}
        return urlencode(
            {name: value for name, value in values.items() if value not in ("", None) and (name, value) != ("page", 1)}
        )

    @property
    def criteria(self) -> list[tuple[str, str]]:
        """Pairs of parameter name and value of the active filters."""
        names = ("kind", "task", "source", "outcome", "step", "reward", "trained", "group")
        return [(name, getattr(self, name)) for name in names if getattr(self, name)]


def _range(text: str, name: str) -> tuple[float, float] | None:
    if not text:
        return None
    first, dots, last = text.partition("..")
    try:
        low = float(first) if first else float("-inf")
        high = (float(last) if last else float("inf")) if dots else low
    except ValueError:
        low = high = float("nan")
    if not low <= high:
        raise AddressError(
            f"{name} {text[:40]!r} is not a number or range", do=f"write {name}=3, {name}=3..7 or {name}=3.."
        )
    return low, high


COLUMNS = (
    "trial, kind, step, task, task_key, t.source, grp, outcome, reward, advantage, not_trained, turns, input_tokens,"
    " output_tokens, seconds, version"
)
"""The columns of `row_of`, in its order."""
FROM = "FROM sources f CROSS JOIN trials t ON f.id = t.file"
"""Join in the order of the files, so that the newest trials are found without reading the others."""
FILE_ORDER = "f.rank, f.id, t.offset"
FROM_TRIALS = "FROM trials t JOIN sources f ON f.id = t.file"
SORTED_BY = {"tokens": "input_tokens + output_tokens"}


class IndexedRun:
    """Indexed run or evaluation folder.

    Args:
        path: The folder.
        reader: Reader for this kind of folder.
    """

    def __init__(self, path: Path, reader: FolderReader) -> None:
        self.path, self._reader = path.absolute(), reader
        self._db = open_index(self.path)
        self._changes, self._cache = -1, dict[object, object]()

    def refresh(self) -> str:
        """Index what was written since the last call. Returns a stamp, in ASCII, that changes with the data.

        Raises:
            UserError: A file of the folder cannot be read.
        """
        try:
            changes = RunIndex(self._db, self.path, self._reader).refresh()
        except sqlite3.DatabaseError:
            changes = self._rebuild()
        if changes != self._changes:
            self._changes = changes
            self._cache.clear()
        return f"{changes}-{quote(self.head().status)}"

    def _rebuild(self) -> int:
        self._db.close()
        remove(self.path)
        self._db, self._changes = open_index(self.path), -1
        return RunIndex(self._db, self.path, self._reader).refresh()

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[tuple]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.DatabaseError:
            self._rebuild()
            return self._db.execute(query, values).fetchall()

    def _cached[T](self, key: object, compute: Callable[[], T]) -> T:
        if key not in self._cache:
            self._cache[key] = compute()
        return cast("T", self._cache[key])

    def head(self) -> RunHead:
        """Return the name, kind and status of the folder."""
        return self._reader.head(self.path)

    def config(self) -> FlatConfig:
        """Return the config of the run; of an evaluation its rules."""
        return self._reader.config(self.path)

    def seconds_since_metrics(self, now: float) -> float:
        """Return the seconds since the last line of the metrics; infinite before the first."""
        written = [path.stat().st_mtime for path in self._reader.metric_files(self.path) if path.is_file()]
        return max(0.0, now - max(written)) if written else float("inf")

    def metrics(self) -> Sequence[MetricRow]:
        """Return the shown metrics of each line of `metrics.jsonl`."""
        query = "SELECT line FROM metrics m JOIN sources f ON f.id = m.file ORDER BY f.rank, m.offset"
        return self._cached("metrics", lambda: [json.loads(line) for (line,) in self._rows(query)])

    def find(self, wanted: TrialFilter) -> tuple[Sequence[TrialRow], int]:
        """Return one page of the matching trials, and the total number of matches."""
        where, values = where_clause(wanted)
        key = wanted.sort.removeprefix("-")
        column = SORTED_BY.get(key, key)
        direction = "DESC" if wanted.sort.startswith("-") else ""
        order = (
            f"{column} IS NULL, {column} {direction}, {FILE_ORDER}" if key else "f.rank DESC, f.id DESC, t.offset DESC"
        )
        page = f"LIMIT {PAGE} OFFSET {(wanted.page - 1) * PAGE}"
        lines = self._rows(f"SELECT {COLUMNS} {FROM} WHERE {where} ORDER BY {order} {page}", values)
        total = self._cached(
            (where, *values), lambda: self._rows(f"SELECT count(*) FROM trials t WHERE {where}", values)[0][0]
        )
        return [row_of(line) for line in lines], total

    def outcomes(self) -> Mapping[tuple[str, int], Mapping[str, int]]:
        """Return the number of trials by outcome, for each kind and step."""
        return self._cached("outcomes", self._count_outcomes)

    def _count_outcomes(self) -> dict[tuple[str, int], dict[str, int]]:
        found: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
        for kind, step, outcome, count in self._rows(
            "SELECT kind, step, outcome, count(*) FROM trials GROUP BY kind, step, outcome ORDER BY kind, step"
        ):
            found[kind, step][outcome] = count
        return dict(found)

    def training_counts(self) -> Mapping[str, int]:
        """Return the number of training trials by `trained` or the reason why not."""
        query = "SELECT status, count(*) FROM trials WHERE kind = 'train' GROUP BY status"
        return self._cached("training_counts", lambda: dict(self._rows(query)))

    def seconds(self) -> Mapping[str, float]:
        """Return the summed seconds of all trials by phase; `total` is for whole trials."""
        query = f"SELECT {', '.join(f'total(s_{phase})' for phase in PHASES)}, count(*) FROM trials"
        row = self._cached("seconds", lambda: self._rows(query)[0])
        return dict(zip(PHASES, row[:-1], strict=True)) if row[-1] else {}

    def rewards(self, kind: str, step: int) -> Mapping[str, Sequence[float]]:
        """Return the rewards of the graded trials of one step, by task key."""
        return self._cached(("rewards", kind, step), lambda: self._find_rewards(kind, step))

    def _find_rewards(self, kind: str, step: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = defaultdict(list)
        query = "SELECT task, task_key, reward FROM trials WHERE kind = ? AND step = ? AND reward IS NOT NULL"
        for task, key, reward in self._rows(query, (kind, step)):
            found[key or task].append(reward)
        return found

    def cells(self, kind: str) -> Mapping[tuple[TaskLabel, int], Cell]:
        """Return the result of each task at each step."""
        return self._cached(("cells", kind), lambda: self._find_cells(kind))

    def _find_cells(self, kind: str) -> dict[tuple[TaskLabel, int], Cell]:
        query = "SELECT task, source, step, avg(reward), count(reward), count(*) FROM trials WHERE kind = ?"
        found = self._rows(f"{query} GROUP BY step, task, source", (kind,))
        names = Counter(task for task, _ in {(task, source) for task, source, *_ in found})
        return {
            (TaskLabel(task, source if names[task] > 1 else ""), step): Cell(mean, graded, trials - graded)
            for task, source, step, mean, graded, trials in found
        }

    def choices(self) -> Mapping[str, Sequence[str]]:
        """Return the occurring values of `outcome`, `source`, `task` and `trained` for the filter form."""
        return self._cached("choices", self._find_choices)

    def _find_choices(self) -> dict[str, list[str]]:
        outcomes: Counter[str] = Counter()
        for counts in self.outcomes().values():
            outcomes.update(counts)
        tasks = {task.name for kind in ("train", "eval") for task, _ in self.cells(kind)}
        return {
            "outcome": [name for name, _ in outcomes.most_common()],
            "source": [name for (name,) in self._rows("SELECT DISTINCT source FROM trials ORDER BY source") if name],
            "task": sorted(tasks),
            "trained": [name for name in self.training_counts() if name != "trained"],
        }

    def group(self, group: str) -> Sequence[TrialRow]:
        """Return the trials of one group; empty if the id is unknown."""
        query = f"SELECT {COLUMNS} {FROM_TRIALS} WHERE grp = ? AND grp != '' ORDER BY {FILE_ORDER}"
        return [row_of(line) for line in self._rows(query, (group,))]

    def detail(self, trial: str) -> TrialDetail | None:
        """Return one trial with its turns; None if the name is unknown."""
        found = self._rows(f"SELECT path, t.offset, length, {COLUMNS} {FROM_TRIALS} WHERE trial = ?", (trial,))
        if not found:
            return None
        path, offset, length, *columns = found[0]
        location = LineLocation(self.path / path, offset, length)
        line = read_line(location)
        row = self._reader.row(line, location.path)
        if row is None:
            return None
        indexed = row_of(columns)
        row = row.model_copy(update={"trial": indexed.trial})
        if indexed.trained and not row.trained:  # an annotation says so
            row = row.model_copy(update={"step": indexed.step, "advantage": indexed.advantage, "not_trained": None})
        return self._reader.detail(self.path, row, line, location.path)


def where_clause(wanted: TrialFilter) -> tuple[str, list[object]]:
    """Return the SQL condition of a filter, and its values."""
    where, values = ["1"], list[object]()
    for name, column in (("kind", "kind"), ("task", "task"), ("source", "t.source"), ("outcome", "outcome")):
        if value := getattr(wanted, name):
            where.append(f"{column} = ?")
            values.append(value)
    if wanted.group:
        where.append("grp = ?")
        values.append(wanted.group)
    if wanted.reward == "none":
        where.append("reward IS NULL")
    for column, span in (("step", wanted.steps), ("reward", wanted.rewards)):
        if span is not None:
            where.append(f"{column} BETWEEN ? AND ?")
            values += span
    if wanted.trained:
        trained = {"yes": "kind = 'train' AND status = 'trained'", "no": "kind = 'train' AND status != 'trained'"}
        where.append(f"({trained.get(wanted.trained, '0')} OR status = ?)")
        values.append(wanted.trained)
    return " AND ".join(where), values
