"""Folders that are there completely or not at all.

`atomic_folder(path)` gives a temporary folder next to `path`; when the block ends well everything in it is
flushed to the disk and it takes the name `path`. Killed at any moment, `path` is the old folder, the new
one, or missing for an instant while an old one is replaced (then the old one lies beside it as `.NAME.old`
and `settle` puts it back). Temporary names start with a dot, so that nothing that lists checkpoints picks
one up.
"""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(path: Path) -> Generator[Path]:
    """A fresh folder to write into; it becomes `path` when the block ends without an exception.

    An older folder of that name is replaced, a half-written one of an earlier process removed.
    """
    settle(path)
    fresh = path.with_name(f".{path.name}.new")
    fresh.mkdir(parents=True)
    try:
        yield fresh
        _flush(fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    _take_over(fresh, path)


def settle(path: Path) -> None:
    """Clean up after a process that was killed inside `atomic_folder(path)`: put the old folder back, drop
    halves."""
    fresh, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        old.rename(path)
    for leftover in (fresh, old):
        if leftover.exists():
            shutil.rmtree(leftover)


def _take_over(fresh: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        path.rename(old)
    fresh.rename(path)
    _flush_one(path.parent)
    if old.exists():
        shutil.rmtree(old)


def _flush(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _flush_one(Path(parent) / name)
        _flush_one(Path(parent))


def _flush_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
