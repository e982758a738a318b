"""Fills the index from the lines that a run writes, each once, also while it goes on.

Invariants: after `refresh` the index says what the files say, whatever the run did since the last one: a torn last line
is not there yet, a file that was replaced, cut or removed is forgotten with all that it said, and of two lines about
one trial that of the later file counts. A refresh is one transaction: a kill leaves the index as it was.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import batched
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from harbortrainer.errors import UserError
from harbortrainer.view.index_file import PHASES
from harbortrainer.view.line_files import JsonLine, LinePlace, parsed_line
from harbortrainer.view.run_kind import RunKind
from harbortrainer.view.shown_metrics import shown_metrics
from harbortrainer.view.shown_trial import TrialEntry

TAIL = 1000
"""Bytes before the place that was read up to, by which a file is known again."""
AT_ONCE = 1000
VALUES = attrgetter(*(field.name for field in fields(TrialEntry)))
COLUMNS = 20 + len(PHASES)
ADD_TRIAL = (
    f"INSERT INTO trials VALUES ({', '.join('?' * COLUMNS)}) ON CONFLICT (trial) DO UPDATE SET "
    + ", ".join(
        f"{name} = excluded.{name}"
        for name in (
            *("kind", "step", "task", "task_key", "source", "grp", "outcome", "reward", "advantage", "not_trained"),
            *("turns", "input_tokens", "output_tokens", "seconds", "version", "fate", "file", "offset", "length"),
            *(f"s_{phase}" for phase in PHASES),
        )
    )
    + " WHERE (SELECT rank FROM sources WHERE id = excluded.file) >= (SELECT rank FROM sources WHERE id = trials.file)"
)


class Source(NamedTuple):
    """One file, as far as it was read."""

    id: int
    path: Path
    inode: int
    done: int
    """Bytes."""
    tail: bytes
    """The last of them."""


class RunIndex:
    """Fills one index.

    Args:
        db: The index, as `open_index` gives it.
        folder: Of the run.
        kind: How to read it.
    """

    def __init__(self, db: sqlite3.Connection, folder: Path, kind: RunKind) -> None:
        self._db, self._folder, self._kind = db, folder, kind

    def refresh(self) -> int:
        """Read what is new. Returns how often the index has changed since it was made.

        Raises:
            UserError: A line of the run cannot be read; the index stays as it was.
            sqlite3.DatabaseError: The index is broken.
        """
        trials, metrics = self._kind.trial_files(self._folder), self._kind.metric_files(self._folder)
        if not self._stale([*trials, *metrics]):
            return self._changes()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            changed = self._take([*trials, *metrics], set(metrics))
            self._db.execute("UPDATE told SET value = value + ? WHERE name = 'changes'", (int(changed),))
            self._db.execute("COMMIT")
        except BaseException:  # a kill, a bad line: the index is what it was
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        return self._changes()

    def _changes(self) -> int:
        return self._db.execute("SELECT value FROM told WHERE name = 'changes'").fetchone()[0]

    def _sources(self) -> dict[Path, Source]:
        rows = self._db.execute("SELECT id, path, inode, done, tail FROM sources")
        return {self._folder / row[1]: Source(row[0], self._folder / row[1], *row[2:]) for row in rows}

    def _stale(self, paths: list[Path]) -> bool:
        known = self._sources()
        there = {path: status for path in paths if (status := _status(path)) is not None}
        return known.keys() != there.keys() or any(
            (status.st_ino, status.st_size) != (known[path].inode, known[path].done) for path, status in there.items()
        )

    def _take(self, paths: list[Path], metrics: set[Path]) -> bool:
        """Forget what is gone or another file by now, then read on in each. Returns whether anything changed."""
        known = self._sources()
        kept = {path: source for path, source in known.items() if path in set(paths) and _same(source)}
        for path in known.keys() - kept.keys():
            self._forget(known[path])
        changed = known.keys() != kept.keys()
        for rank, path in enumerate(paths):
            if (status := _status(path)) is None:
                continue
            source = kept.get(path) or self._begin(path, status.st_ino)
            self._db.execute("UPDATE sources SET rank = ? WHERE id = ?", (rank, source.id))
            changed |= self._read_on(source, metrics=path in metrics)
        return changed

    def _forget(self, source: Source) -> None:
        for table, column in (("trials", "file"), ("metrics", "file"), ("sources", "id")):
            self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (source.id,))

    def _begin(self, path: Path, inode: int) -> Source:
        name = str(path.relative_to(self._folder))
        made = self._db.execute("INSERT INTO sources VALUES (NULL, ?, 0, ?, 0, ?)", (name, inode, b""))
        return Source(made.lastrowid or 0, path, inode, 0, b"")

    def _read_on(self, source: Source, *, metrics: bool) -> bool:
        lines = _Lines(source)
        if metrics:
            self._db.executemany("INSERT INTO metrics VALUES (?, ?, ?)", self._metric_rows(source, lines))
        else:
            for some in batched(self._trial_rows(source, lines), AT_ONCE):
                self._db.executemany(ADD_TRIAL, some)
        where = (lines.done, lines.tail, source.id)
        self._db.execute("UPDATE sources SET done = ?, tail = ? WHERE id = ?", where)
        return lines.done > source.done

    def _metric_rows(self, source: Source, lines: Iterable[tuple[JsonLine, LinePlace]]) -> Iterator[tuple]:
        for row, place in lines:
            if (shown := shown_metrics(row)) is not None:
                yield source.id, place.offset, json.dumps(shown)

    def _trial_rows(self, source: Source, lines: Iterable[tuple[JsonLine, LinePlace]]) -> Iterator[tuple]:
        for row, place in lines:
            if missing := sorted(self._kind.needs - row.keys()):
                where = f"{place.path}: the line at byte {place.offset}"
                what = f"has no {missing[0]!r}: another release of harbortrainer wrote it"
                raise UserError(what, where=where, do="look at it with that release")
            if (line := self._kind.line(row, place.path)) is not None:
                timings = self._kind.timings(row)
                seconds = [_seconds(timings.get(phase)) for phase in PHASES]
                yield *VALUES(line), fate_of(line), source.id, place.offset, place.length, *seconds


class _Lines:
    """The whole lines of a file from where it was read up to, with their places."""

    def __init__(self, source: Source) -> None:
        self._path, self.done, self.tail = source.path, source.done, source.tail

    def __iter__(self) -> Iterator[tuple[JsonLine, LinePlace]]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return  # gone since it was looked for; the next refresh forgets it
        with file:
            file.seek(self.done)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                place = LinePlace(self._path, self.done, len(line))
                self.done, self.tail = self.done + len(line), line[-TAIL:]
                if line.strip():
                    yield parsed_line(line, place), place


def fate_of(line: TrialEntry) -> str:
    """`trained`, or why not; empty in an evaluation."""
    return "" if line.kind == "eval" else "trained" if line.trained else line.not_trained or "unknown"


def _status(path: Path):
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _same(source: Source) -> bool:
    """Whether the file is still the one that was read: it grew at most."""
    status = _status(source.path)
    if status is None or status.st_ino != source.inode or status.st_size < source.done:
        return False
    with source.path.open("rb") as file:
        file.seek(source.done - len(source.tail))
        return file.read(len(source.tail)) == source.tail


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
