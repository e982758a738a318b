"""A run as its index has it: what the pages ask, in SQL.

Contract: `TrialStore`. Invariant: every figure is of what the last `refresh` read; what was counted once is not counted
again before the next change. An index that turns out to be broken is made anew, once, from the run's files.
"""

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from harbortrainer.view.index_file import PHASES, open_index, remove
from harbortrainer.view.line_files import LinePlace, line_at
from harbortrainer.view.run_index import RunIndex
from harbortrainer.view.run_kind import RunKind
from harbortrainer.view.shown_trial import Cell, RunHead, TrialEntry, TrialSheet
from harbortrainer.view.trial_filter import PAGE, TrialFilter
from harbortrainer.view.trial_store import MetricRow

LINE = (
    "trial, kind, step, task, task_key, t.source, grp, outcome, reward, advantage, not_trained, turns, input_tokens,"
    " output_tokens, seconds, version"
)
"""The columns of a `TrialEntry`, in its order."""
FROM = "FROM sources f CROSS JOIN trials t ON f.id = t.file"
"""In the order of the files: the newest trials are found without looking at the others."""
IN_ORDER = "f.rank, f.id, t.offset"
OF_ONE = "FROM trials t JOIN sources f ON f.id = t.file"
SORTED_BY = {"tokens": "input_tokens + output_tokens"}


class IndexedRun:
    """One folder.

    Args:
        path: The folder.
        kind: How to read it.
    """

    def __init__(self, path: Path, kind: RunKind) -> None:
        self.path, self._kind = path.absolute(), kind
        self._db = open_index(self.path)
        self._changes, self._counted = -1, dict[object, object]()

    def refresh(self) -> str:
        """See `TrialStore`."""
        try:
            changes = RunIndex(self._db, self.path, self._kind).refresh()
        except sqlite3.DatabaseError:
            changes = self._made_anew()
        if changes != self._changes:
            self._changes = changes
            self._counted.clear()
        return f"{changes}-{self.head().status}"

    def _made_anew(self) -> int:
        self._db.close()
        remove(self.path)
        self._db, self._changes = open_index(self.path), -1
        return RunIndex(self._db, self.path, self._kind).refresh()

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[tuple]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.DatabaseError:
            self._made_anew()
            return self._db.execute(query, values).fetchall()

    def _once[T](self, key: object, made: Callable[[], T]) -> T:
        if key not in self._counted:
            self._counted[key] = made()
        return cast("T", self._counted[key])

    def head(self) -> RunHead:
        """See `TrialStore`."""
        return self._kind.head(self.path)

    def metrics(self) -> Sequence[MetricRow]:
        """See `TrialStore`."""
        query = "SELECT line FROM metrics m JOIN sources f ON f.id = m.file ORDER BY f.rank, m.offset"
        return self._once("metrics", lambda: [json.loads(line) for (line,) in self._rows(query)])

    def found(self, wanted: TrialFilter) -> tuple[Sequence[TrialEntry], int]:
        """See `TrialStore`."""
        where, values = asked(wanted)
        key = wanted.sort.removeprefix("-")
        column = SORTED_BY.get(key, key)
        down = "DESC" if wanted.sort.startswith("-") else ""
        order = f"{column} IS NULL, {column} {down}, {IN_ORDER}" if key else "f.rank DESC, f.id DESC, t.offset DESC"
        page = f"LIMIT {PAGE} OFFSET {(wanted.page - 1) * PAGE}"
        lines = self._rows(f"SELECT {LINE} {FROM} WHERE {where} ORDER BY {order} {page}", values)
        total = self._once(
            (where, *values), lambda: self._rows(f"SELECT count(*) FROM trials t WHERE {where}", values)[0][0]
        )
        return [TrialEntry(*line) for line in lines], total

    def outcomes(self) -> Mapping[tuple[str, int], Mapping[str, int]]:
        """See `TrialStore`."""
        return self._once("outcomes", self._count_outcomes)

    def _count_outcomes(self) -> dict[tuple[str, int], dict[str, int]]:
        found: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
        for kind, step, outcome, count in self._rows(
            "SELECT kind, step, outcome, count(*) FROM trials GROUP BY kind, step, outcome ORDER BY kind, step"
        ):
            found[kind, step][outcome] = count
        return dict(found)

    def fates(self) -> Mapping[str, int]:
        """See `TrialStore`."""
        query = "SELECT fate, count(*) FROM trials WHERE kind = 'train' GROUP BY fate"
        return self._once("fates", lambda: dict(self._rows(query)))

    def seconds(self) -> Mapping[str, float]:
        """See `TrialStore`."""
        query = f"SELECT {', '.join(f'total(s_{phase})' for phase in PHASES)}, count(*) FROM trials"
        row = self._once("seconds", lambda: self._rows(query)[0])
        return dict(zip(PHASES, row[:-1], strict=True)) if row[-1] else {}

    def rewards(self, kind: str, step: int) -> Mapping[str, Sequence[float]]:
        """See `TrialStore`."""
        return self._once(("rewards", kind, step), lambda: self._find_rewards(kind, step))

    def _find_rewards(self, kind: str, step: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = defaultdict(list)
        query = "SELECT task, task_key, reward FROM trials WHERE kind = ? AND step = ? AND reward IS NOT NULL"
        for task, key, reward in self._rows(query, (kind, step)):
            found[key or task].append(reward)
        return found

    def cells(self, kind: str) -> Mapping[tuple[str, int], Cell]:
        """See `TrialStore`."""
        query = "SELECT task, step, avg(reward), count(reward), count(*) FROM trials WHERE kind = ? GROUP BY step, task"
        return self._once(
            ("cells", kind),
            lambda: {
                (task, step): Cell(mean, graded, trials - graded)
                for task, step, mean, graded, trials in self._rows(query, (kind,))
            },
        )

    def choices(self) -> Mapping[str, Sequence[str]]:
        """See `TrialStore`."""
        return self._once("choices", self._find_choices)

    def _find_choices(self) -> dict[str, list[str]]:
        outcomes: Counter[str] = Counter()
        for counts in self.outcomes().values():
            outcomes.update(counts)
        tasks = {task for kind in ("train", "eval") for task, _ in self.cells(kind)}
        return {
            "outcome": [name for name, _ in outcomes.most_common()],
            "source": [name for (name,) in self._rows("SELECT DISTINCT source FROM trials ORDER BY source") if name],
            "task": sorted(tasks),
            "trained": [name for name in self.fates() if name != "trained"],
        }

    def group(self, group: str) -> Sequence[TrialEntry]:
        """See `TrialStore`."""
        query = f"SELECT {LINE} {OF_ONE} WHERE grp = ? AND grp != '' ORDER BY {IN_ORDER}"
        return [TrialEntry(*line) for line in self._rows(query, (group,))]

    def sheet(self, trial: str) -> TrialSheet | None:
        """See `TrialStore`."""
        rows = self._rows(f"SELECT {LINE}, path, t.offset, length {OF_ONE} WHERE trial = ?", (trial,))
        if not rows:
            return None
        *line, path, offset, length = rows[0]
        return self._kind.sheet(self.path, TrialEntry(*line), line_at(LinePlace(self.path / path, offset, length)))


def asked(wanted: TrialFilter) -> tuple[str, list[object]]:
    """The condition that a trial must meet, and its values."""
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
        trained = {"yes": "kind = 'train' AND fate = 'trained'", "no": "kind = 'train' AND fate != 'trained'"}
        where.append(f"({trained.get(wanted.trained, '0')} OR fate = ?)")
        values.append(wanted.trained)
    return " AND ".join(where), values
