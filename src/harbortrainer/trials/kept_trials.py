"""Size limit of the failed trials' folders that `keep_trials = "failed"` keeps.

`trials/.kept.jsonl` has a line for each kept folder, the oldest first: its name, its bytes and its modification time.
All workers that share the folder write to it.

Invariant: only the folder of an ended trial is removed. It gets its line at the end, and a folder that has changed
since then stays: a retried start, which has the same name, may be running in it.
"""

import asyncio
import contextlib
import functools
import logging
import os
import shutil
from pathlib import Path

from harbortrainer.runs.durable import append_line, read_lines, write_lines
from harbortrainer.runs.locks import NoLocksError, file_lock

KEPT_FILE = ".kept.jsonl"
LOCK_FILE = ".kept.lock"
CHECKS = 50
"""A worker compares the total with the limit each time that it has kept this part of it: it reads the whole file."""

_log = logging.getLogger(__name__)
_unchecked: dict[Path, int] = {}
"""Bytes that this process has kept in a folder of trials since its last comparison."""


async def limit_kept(folder: Path, most: int) -> None:
    """Register the folder of an ended trial, and remove the oldest registered ones while they exceed the limit.

    Args:
        folder: The trial's folder.
        most: Limit of the registered folders beside it in bytes. They may exceed it by 1/50 for each worker.
    """
    try:
        async with file_lock(folder.parent / LOCK_FILE):
            await asyncio.to_thread(_register, folder, most)
    except NoLocksError as error:  # must not become the trial's outcome
        _warn_once(str(error))


@functools.cache
def _warn_once(fault: str) -> None:
    """Warn once per process."""
    _log.warning("keep_trials_mb has no effect: %s", fault)


def _register(folder: Path, most: int) -> None:
    if (changed := _changed(folder)) is None:
        return  # the trial failed before it had a folder
    trials, size = folder.parent, bytes_on_disk(folder)
    append_line(trials / KEPT_FILE, {"trial": folder.name, "bytes": size, "changed": changed})
    _unchecked[trials] = _unchecked.get(trials, 0) + size
    if _unchecked[trials] * CHECKS >= most:
        _unchecked[trials] = 0
        _remove_oldest(trials, most)


def _remove_oldest(trials: Path, most: int) -> None:
    rows = [row for row in read_lines(trials / KEPT_FILE) if _changed(trials / row["trial"]) == row["changed"]]
    total, removed = sum(row["bytes"] for row in rows), 0
    while total > most:
        shutil.rmtree(trials / rows[removed]["trial"], ignore_errors=True)
        total -= rows[removed]["bytes"]
        removed += 1
    write_lines(trials / KEPT_FILE, rows[removed:])


def _changed(folder: Path) -> int | None:
    """Return the modification time of a folder in nanoseconds; None if there is none."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def bytes_on_disk(folder: Path) -> int:
    """Return the bytes that the files in a folder take on disk; links are not followed."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # a path of the agent's that is too long to read
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512  # noqa: PTH118 - names of any depth
    return total
