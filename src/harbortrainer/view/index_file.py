"""The file of the index beside a run: made where there is none, and anew where it is broken or of another release.

Contract: the index holds nothing that the run's own files do not say; it can be removed at any time. Where the folder
cannot be written to, the index is kept in memory.
"""

import sqlite3
from contextlib import suppress
from pathlib import Path

NAME = "view.sqlite"
VERSION = 1
"""Of the tables; an index of another version is made anew."""
PHASES = ("environment_setup", "agent_setup", "agent_execution", "model", "verifier", "total")

TABLES = f"""
CREATE TABLE told (name TEXT PRIMARY KEY, value);
CREATE TABLE sources (
    id INTEGER PRIMARY KEY, path TEXT UNIQUE, rank INTEGER, inode INTEGER, done INTEGER, tail BLOB
);
CREATE TABLE trials (
    trial TEXT UNIQUE, kind TEXT, step INTEGER, task TEXT, task_key TEXT, source TEXT, grp TEXT, outcome TEXT,
    reward REAL, advantage REAL, not_trained TEXT, turns INTEGER, input_tokens INTEGER, output_tokens INTEGER,
    seconds REAL, version INTEGER, fate TEXT, file INTEGER, offset INTEGER, length INTEGER,
    {", ".join(f"s_{phase} REAL" for phase in PHASES)}
);
CREATE INDEX by_rank ON sources (rank);
CREATE INDEX by_file ON trials (file, offset);
CREATE INDEX by_group ON trials (grp);
CREATE INDEX by_cell ON trials (kind, step, task, task_key, reward, outcome);
CREATE TABLE metrics (file INTEGER, offset INTEGER, line TEXT, PRIMARY KEY (file, offset)) WITHOUT ROWID;
INSERT INTO told VALUES ('changes', 0);
"""


class BrokenIndexError(Exception):
    """The index cannot be used as it is."""


def open_index(folder: Path) -> sqlite3.Connection:
    """The index of a folder, ready to be read and written."""
    path = folder / NAME
    with suppress(BrokenIndexError, sqlite3.Error):
        return _opened(path)
    with suppress(OSError, BrokenIndexError, sqlite3.Error):
        remove(folder)
        return _opened(path)
    return _opened(":memory:")


def remove(folder: Path) -> None:
    """Remove the index of a folder; the next one is made from the run's files."""
    for suffix in ("", "-journal"):
        (folder / f"{NAME}{suffix}").unlink(missing_ok=True)


def _opened(path: Path | str) -> sqlite3.Connection:
    made = sqlite3.connect(path, timeout=30, check_same_thread=False, isolation_level=None)
    try:
        made.execute("PRAGMA synchronous = OFF")  # what a power cut breaks is made anew
        version = made.execute("PRAGMA user_version").fetchone()[0]
        tables = made.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not tables:
            made.executescript(f"BEGIN EXCLUSIVE; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        elif version != VERSION:
            raise BrokenIndexError(f"it is of version {version}")  # noqa: TRY301 - closed below
        made.execute("UPDATE told SET value = value WHERE name = 'changes'")  # raises where nothing can be written
    except BaseException:  # whoever opens it takes another one
        made.close()
        raise
    return made
