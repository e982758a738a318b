"""SQLite index of a run folder: trials, metrics and the file offsets of their lines.

Contract: the index only repeats the run's files, so it can be deleted at any time. A broken index, or one of another
`VERSION`, is rebuilt. If the folder is not writable, the index is kept in memory.

Invariants: after `refresh` the index equals the files.
- An incomplete last line is not indexed yet.
- A replaced, shortened or removed file is dropped with all its rows.
- If two lines describe one trial, the line of the later file counts.
- An annotation applies to the trial that it names, whichever of the two is indexed first.
- A file that its writer seals keeps its rows (`runs/sealed_files.py`).
- A refresh is one transaction, so a kill leaves the index unchanged.
"""

import json
import logging
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import batched
from pathlib import Path
from typing import NamedTuple

from harbortrainer.errors import UserError
from harbortrainer.runs.sealed_files import open_lines, status_of
from harbortrainer.runs.trial_row import RowTokens, TrialRow
from harbortrainer.view.folder_reader import FolderReader, JsonLine, LineLocation, parse_line, parse_torn_line
from harbortrainer.view.trial_view import UNDECIDED_STEP

logger = logging.getLogger(__name__)

NAME = "view.sqlite"
VERSION = 9
"""Version of the tables; an index of another version is rebuilt."""
PHASES = ("environment_setup", "agent_setup", "agent_execution", "model", "verifier", "total")

TABLES = f"""
CREATE TABLE counters (name TEXT PRIMARY KEY, value);
CREATE TABLE sources (
    id INTEGER PRIMARY KEY, path TEXT UNIQUE, rank INTEGER, inode INTEGER, done INTEGER, tail BLOB
);
CREATE TABLE trials (
    trial TEXT UNIQUE, kind TEXT, step INTEGER, task TEXT, task_key TEXT, source TEXT, grp TEXT, outcome TEXT,
    reward REAL, advantage REAL, not_trained TEXT, turns INTEGER, input_tokens INTEGER, output_tokens INTEGER,
    seconds REAL, version INTEGER, status TEXT, trace TEXT, file INTEGER, offset INTEGER, length INTEGER,
    {", ".join(f"s_{phase} REAL" for phase in PHASES)}
);
CREATE INDEX by_rank ON sources (rank);
CREATE INDEX by_file ON trials (file, offset);
CREATE INDEX by_group ON trials (grp);
CREATE INDEX by_cell ON trials (kind, step, task, source, task_key, reward, outcome);
CREATE TABLE annotations (trace TEXT PRIMARY KEY, file INTEGER, step INTEGER, advantage REAL) WITHOUT ROWID;
CREATE TABLE metrics (file INTEGER, offset INTEGER, line TEXT, PRIMARY KEY (file, offset)) WITHOUT ROWID;
INSERT INTO counters VALUES ('changes', 0);
"""


class BrokenIndexError(Exception):
    """The index is damaged or of another version."""


def open_index(folder: Path) -> sqlite3.Connection:
    """Open or create the index of a folder."""
    path = folder / NAME
    with suppress(BrokenIndexError, sqlite3.Error):
        return _connect(path)
    with suppress(OSError, BrokenIndexError, sqlite3.Error):
        remove(folder)
        return _connect(path)
    return _connect(":memory:")


def remove(folder: Path) -> None:
    """Delete the index of a folder."""
    for suffix in ("", "-journal"):
        (folder / f"{NAME}{suffix}").unlink(missing_ok=True)


def _connect(path: Path | str) -> sqlite3.Connection:
    made = sqlite3.connect(path, timeout=30, check_same_thread=False, isolation_level=None)
    try:
        made.execute("PRAGMA synchronous = OFF")  # after a power cut the index is rebuilt
        version = made.execute("PRAGMA user_version").fetchone()[0]
        tables = made.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not tables:
            made.executescript(f"BEGIN EXCLUSIVE; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        elif version != VERSION:
            raise BrokenIndexError(f"index has version {version}")  # noqa: TRY301 - closed below
        made.execute("UPDATE counters SET value = value WHERE name = 'changes'")  # raises if the file is read-only
    except BaseException:
        made.close()
        raise
    return made


def columns_of(row: TrialRow) -> tuple[object, ...]:
    """Return the values of the columns from `trial` to `version`."""
    step = UNDECIDED_STEP if row.step is None else row.step
    about = (row.trial, row.kind, step, row.task, row.task_key, row.source, row.group or "", row.outcome)
    tokens = row.input_tokens, row.output_tokens
    return *about, row.reward, row.advantage, row.untrained, row.turns, *tokens, row.wall_s, row.version


def row_of(columns: Sequence) -> TrialRow:
    """Return the row with these values of the columns from `trial` to `version`."""
    trial, kind, step, task, task_key, source, group, outcome, *figures = columns
    reward, advantage, not_trained, turns, input_tokens, output_tokens, seconds, version = figures
    return TrialRow(
        trial=trial,
        kind=kind,
        step=None if step == UNDECIDED_STEP else step,
        task=task,
        task_key=task_key,
        source=source,
        group=group,
        outcome=outcome,
        reward=reward,
        advantage=advantage,
        not_trained=not_trained,
        turns=turns,
        tokens=RowTokens(input=input_tokens, output=output_tokens),
        seconds=seconds,
        version=version,
    )


type MetricRow = Mapping[str, float]

SHOWN_METRICS = re.compile(
    r"step|loss|eval/(mean_reward|low|high|n|tasks|stderr)|train/agg/all/agent/(reward/.*|solved_\w+|is_truncated/mean)"
    r"|time/\w+|(staleness|off_policy)/\w+|mismatch_kl/all/\w+|entropy/all/mean|optim/grad_norm|is_(masked|clipped)/mean"
    r"|perf/\w+|progress/\w+|batch/empty|cost/.*|proof/(spread|rescored|logprob_diff/max)|train/agg/all/num_(turns|output_tokens)/mean"
)


def select_metrics(row: Mapping[str, object]) -> MetricRow | None:
    """Return the shown metrics of a line that are numbers; None for a line without a step."""
    if not isinstance(row.get("step"), int):
        return None
    return {key: value for key, value in row.items() if isinstance(value, int | float) and SHOWN_METRICS.fullmatch(key)}


TAIL = 1000
"""Most bytes of the last indexed line to save; they identify the file at the next refresh."""
BATCH = 1000
COLUMNS = 21 + len(PHASES)
ADD_TRIAL = (
    f"INSERT INTO trials VALUES ({', '.join('?' * COLUMNS)}) ON CONFLICT (trial) DO UPDATE SET "
    + ", ".join(
        f"{name} = excluded.{name}"
        for name in (
            *("kind", "step", "task", "task_key", "source", "grp", "outcome", "reward", "advantage", "not_trained"),
            *("turns", "input_tokens", "output_tokens", "seconds", "version", "status", "trace", "file"),
            *("offset", "length"),
            *(f"s_{phase}" for phase in PHASES),
        )
    )
    + " WHERE (SELECT rank FROM sources WHERE id = excluded.file) >= (SELECT rank FROM sources WHERE id = trials.file)"
)


APPLY_ANNOTATIONS = """
UPDATE trials SET step = a.step, advantage = a.advantage, not_trained = '', status = 'trained'
FROM annotations a WHERE a.trace = trials.trace AND kind = 'train'
AND (trials.step, trials.advantage, trials.status) IS NOT (a.step, a.advantage, 'trained')
"""


class Source(NamedTuple):
    """One indexed file."""

    id: int
    path: Path
    inode: int
    done: int
    """Bytes indexed so far."""
    tail: bytes
    """End of the last indexed line."""


class RunIndex:
    """Writer of the index.

    Args:
        db: The index, from `open_index`.
        folder: The run folder.
        reader: Reader for this kind of folder.
    """

    def __init__(self, db: sqlite3.Connection, folder: Path, reader: FolderReader) -> None:
        self._db, self._folder, self._reader = db, folder, reader

    def refresh(self) -> int:
        """Index new lines. Returns the number of changes since the index was created.

        Raises:
            UserError: A line of the run is invalid; the index is unchanged.
            sqlite3.DatabaseError: The index is broken.
        """
        trials, metrics = self._reader.trial_files(self._folder), self._reader.metric_files(self._folder)
        annotations = self._reader.annotation_files(self._folder)
        paths = [*trials, *annotations, *metrics]
        if not self._stale(paths):
            return self._changes()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            readers = dict.fromkeys(annotations, self._read_annotations) | dict.fromkeys(metrics, self._read_metrics)
            changed = self._update(paths, readers)
            self._db.execute("UPDATE counters SET value = value + ? WHERE name = 'changes'", (int(changed),))
            self._db.execute("COMMIT")
        except BaseException:  # also KeyboardInterrupt: leave the index unchanged
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        return self._changes()

    def _changes(self) -> int:
        return self._db.execute("SELECT value FROM counters WHERE name = 'changes'").fetchone()[0]

    def _sources(self) -> dict[Path, Source]:
        rows = self._db.execute("SELECT id, path, inode, done, tail FROM sources")
        return {self._folder / row[1]: Source(row[0], self._folder / row[1], *row[2:]) for row in rows}

    def _stale(self, paths: list[Path]) -> bool:
        known = self._sources()
        existing = {path: status for path in paths if (status := status_of(path)) is not None}
        return known.keys() != existing.keys() or any(
            (status.inode, status.size) != (known[path].inode, known[path].done) for path, status in existing.items()
        )

    def _update(self, paths: list[Path], readers: Mapping[Path, "LineReader"]) -> bool:
        """Delete rows of removed or replaced files, then index new lines. Returns whether anything changed.

        Args:
            paths: All files, in the order of the run.
            readers: The readers of the files that do not have trials.
        """
        known = self._sources()
        kept = {path: source for path, source in known.items() if path in set(paths) and _is_unchanged(source)}
        if any(self._has_annotations(known[path]) for path in known.keys() - kept.keys()):
            kept = {}  # its annotations have changed the rows of other files
        for path in known.keys() - kept.keys():
            self._delete(known[path])
        changed = known.keys() != kept.keys()
        for rank, path in enumerate(paths):
            if (status := status_of(path)) is None:
                continue
            source = kept.get(path) or self._add_source(path, status.inode)
            self._db.execute("UPDATE sources SET rank = ?, inode = ? WHERE id = ?", (rank, status.inode, source.id))
            changed |= self._read_new_lines(source, readers.get(path, self._read_trials))
        if changed:
            self._db.execute(APPLY_ANNOTATIONS)
        return changed

    def _has_annotations(self, source: Source) -> bool:
        query = "SELECT EXISTS (SELECT 1 FROM annotations WHERE file = ?)"
        return bool(self._db.execute(query, (source.id,)).fetchone()[0])

    def _delete(self, source: Source) -> None:
        for table, column in (("trials", "file"), ("metrics", "file"), ("annotations", "file"), ("sources", "id")):
            self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (source.id,))

    def _add_source(self, path: Path, inode: int) -> Source:
        name = str(path.relative_to(self._folder))
        made = self._db.execute("INSERT INTO sources VALUES (NULL, ?, 0, ?, 0, ?)", (name, inode, b""))
        return Source(made.lastrowid or 0, path, inode, 0, b"")

    def _read_new_lines(self, source: Source, read: "LineReader") -> bool:
        lines = _Lines(source, self._reader.goes_on_after_torn_lines)
        read(source, lines)
        where = (lines.done, lines.tail, source.id)
        self._db.execute("UPDATE sources SET done = ?, tail = ? WHERE id = ?", where)
        return lines.done > source.done

    def _read_trials(self, source: Source, lines: "_Lines") -> None:
        for some in batched(self._trial_rows(source, lines), BATCH):
            self._db.executemany(ADD_TRIAL, some)

    def _read_metrics(self, source: Source, lines: "_Lines") -> None:
        self._db.executemany("INSERT INTO metrics VALUES (?, ?, ?)", self._metric_rows(source, lines))

    def _read_annotations(self, source: Source, lines: "_Lines") -> None:
        found = (self._reader.annotation(line) for line, _ in lines)
        rows = ((one.trace, source.id, one.step, one.advantage) for one in found if one is not None)
        self._db.executemany("INSERT OR REPLACE INTO annotations VALUES (?, ?, ?, ?)", rows)

    def _metric_rows(self, source: Source, lines: Iterable[tuple[JsonLine, LineLocation]]) -> Iterator[tuple]:
        for row, location in lines:
            if (shown := select_metrics(row)) is not None:
                yield source.id, location.offset, json.dumps(shown)

    def _trial_rows(self, source: Source, lines: Iterable[tuple[JsonLine, LineLocation]]) -> Iterator[tuple]:
        for line, location in lines:
            if missing := sorted(self._reader.required_fields - line.keys()):
                where = f"{location.path}: the line at byte {location.offset}"
                what = f"has no field {missing[0]!r}, so another release of harbortrainer wrote it"
                raise UserError(what, where=where, do="use that release to view it")
            if (row := self._reader.row(line, location.path)) is not None:
                row = row if row.trial else row.model_copy(update={"trial": place_name(row.task, location)})
                seconds = [row.timings.get(phase, 0.0) for phase in PHASES]
                place = (source.id, location.offset, location.length)
                yield *columns_of(row), training_status(row), self._reader.trace(line), *place, *seconds


class _Lines:
    """Iterator over the complete new lines of a file, with their locations.

    Args:
        source: The file.
        torn: Whether a line may begin with a cut one (`FolderReader.goes_on_after_torn_lines`).
    """

    def __init__(self, source: Source, torn: bool) -> None:
        self._path, self.done, self.tail, self._torn = source.path, source.done, source.tail, torn

    def __iter__(self) -> Iterator[tuple[JsonLine, LineLocation]]:
        # A file that was removed meanwhile: the next refresh deletes its rows.
        with suppress(FileNotFoundError), open_lines(self._path) as file:
            file.seek(self.done)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                location = LineLocation(self._path, self.done, len(line))
                self.done, self.tail = self.done + len(line), line[-TAIL:]
                if line.strip():
                    yield from self._parse(line, location)

    def _parse(self, line: bytes, location: LineLocation) -> Iterator[tuple[JsonLine, LineLocation]]:
        try:
            yield parse_line(line, location), location
        except UserError:
            if not self._torn:
                raise
            logger.warning("%s: the line at byte %d was cut when the run ended", location.path, location.offset)
            if whole := parse_torn_line(line, location):
                yield whole


type LineReader = Callable[[Source, _Lines], None]
"""Reader of the new lines of a file."""


def place_name(task: str, location: LineLocation) -> str:
    """Return a name for a trial without one: its environment server failed before it started the trial."""
    return f"{task}__{location.path.stem}-{location.offset}"


def training_status(row: TrialRow) -> str:
    """Return `trained` or the reason why not; empty for an evaluation."""
    return "" if row.kind == "eval" else "trained" if row.trained else row.untrained or "unknown"


def _is_unchanged(source: Source) -> bool:
    """Return whether the file is the indexed one, sealed or not, and has at most grown."""
    status = status_of(source.path)
    if status is None or status.size < source.done or not (status.sealed or status.inode == source.inode):
        return False
    with open_lines(source.path) as file:
        file.seek(source.done - len(source.tail))
        return file.read(len(source.tail)) == source.tail
