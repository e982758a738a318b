"""Harbor's hashes of a task, computed again only after one of its files has changed.

For each trial, Harbor reads every file of the task twice, while all other trials of the process wait: once for
`task_checksum` in `result.json`, once for the digest in `lock.json`. Here a process keeps both as long as the folder's
metadata is the same. Invariant: a trial records what its files contain. Without the private names below, Harbor
computes both itself.
"""

import hashlib
import os
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

_SETTLED_NS = 2_000_000_000
"""Age of a change from which on a further change has another time, on file systems with coarse clocks too."""


def metadata_digest(folder: Path) -> bytes | None:
    """Return a digest of names, modes, sizes and times below a folder, which changes with each change of a file.

    Returns:
        The digest. None if it proves nothing: something changed just now, or is a link, or cannot be read.
    """
    found, folders, newest = [], [str(folder)], 0
    try:
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        return None
                    status = entry.stat()
                    times = status.st_mtime_ns, status.st_ctime_ns
                    newest = max(newest, *times)
                    found.append((entry.path, status.st_mode, status.st_ino, status.st_size, *times))
                    if entry.is_dir():
                        folders.append(entry.path)
    except OSError:
        return None
    return None if newest > time.time_ns() - _SETTLED_NS else hashlib.sha256(repr(sorted(found)).encode()).digest()


class TaskHashes[T]:
    """Keeps one hash for each task's folder."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[bytes, T]] = {}

    def get(self, folder: Path, compute: Callable[[], T]) -> T:
        """Return what `compute` returns, or has returned for the same files."""
        state = metadata_digest(folder)
        if state is None:
            return compute()
        if folder not in self._kept or self._kept[folder][0] != state:
            self._kept[folder] = state, compute()
        return self._kept[folder][1]


@cache
def keep_task_hashes() -> None:
    """Keep the hashes of each task that this process plays."""
    from harbor.models.job import lock
    from harbor.models.task.task import Task

    checksums, checksum = TaskHashes[str](), Task.checksum
    compute = checksum.fget if isinstance(checksum, property) else None
    if compute is not None:
        setattr(Task, "checksum", property(lambda task: checksums.get(task.task_dir, partial(compute, task))))  # noqa: B010

    packager = getattr(lock, "Packager", None)
    if packager is not None:
        digests = TaskHashes[str]()

        class KeepingPackager(packager):
            @staticmethod
            def compute_content_hash(task_dir: Path) -> tuple[str, list[Path]]:
                return digests.get(task_dir, lambda: packager.compute_content_hash(task_dir)[0]), []

        vars(lock)["Packager"] = KeepingPackager
