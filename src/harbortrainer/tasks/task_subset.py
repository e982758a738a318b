"""The tasks that a command works on: a subset of a source, and one rule for tasks that cannot be used.

The rule: a task that cannot be read, that Harbor refuses, or that repeats another task is reported with a `BAD` line
and left out. The command goes on with the others. Its exit code is then 1, unless `skip_bad` is set.

Invariants: names are filtered by pattern, then by shard, then by limit. The shards of a source are disjoint, and
together they are the whole source. A task outside the subset is not read.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from harbortrainer.config.task_source import TaskSource
from harbortrainer.errors import UserError
from harbortrainer.tasks.task_errors import reading_task
from harbortrainer.tasks.task_folder import BadTasksError, TaskRef, find_folders, read_tasks
from harbortrainer.tasks.task_listing import harbor_config
from harbortrainer.tasks.task_store import FetchedTasks, fetch


@dataclass(frozen=True)
class TaskSubset:
    """The options `--include`, `--exclude`, `--shard`, `--limit` and `--skip-bad`."""

    include: Sequence[str] = ()
    """Shell patterns for names; empty means all."""
    exclude: Sequence[str] = ()
    """Shell patterns for names, applied after `include`."""
    shard: str | None = None
    """`I/N`: every N-th name, from the I-th on; I counts from 1."""
    limit: int | None = None
    """Most tasks."""
    skip_bad: bool = False
    """Whether tasks that cannot be used leave the exit code at 0."""

    def pick(self, names: Sequence[str]) -> list[str]:
        """Return the names of the shard, at most `limit`.

        Args:
            names: Sorted names that match the patterns.

        Raises:
            UserError: The shard is not I/N, or has no tasks.
        """
        first, step = self._shard()
        chosen = list(names)[first::step][: self.limit]
        if not chosen:
            do = f"use at most {len(names)} shards"
            raise UserError(f"the shard {self.shard} of {len(names)} tasks is empty", where="--shard", do=do)
        return chosen

    def _shard(self) -> tuple[int, int]:
        """Return the index of the shard's first name, and the number of shards."""
        if self.shard is None:
            return 0, 1
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.shard)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            do = "write I/N with I from 1 to N, e.g. 1/4"
            raise UserError(f"{self.shard!r} is not a shard", where="--shard", do=do)
        return int(found[1]) - 1, int(found[2])


@dataclass
class LoadedTasks:
    """The tasks of a subset."""

    fetched: FetchedTasks
    """The source on this machine."""
    tasks: list[TaskRef]
    """Usable tasks, sorted by name."""
    bad: dict[str, UserError] = field(default_factory=dict)
    """Errors of the other tasks, by name."""
    skip_bad: bool = False

    @property
    def total(self) -> int:
        """Number of all tasks of the subset."""
        return len(self.tasks) + len(self.bad)

    @property
    def exit_code(self) -> int:
        """1 if a task is bad and bad tasks are not skipped, or if all are bad; else 0."""
        return 1 if self.bad and not (self.skip_bad and self.tasks) else 0

    def leave_out(self, task: TaskRef, error: UserError) -> None:
        """Turn a usable task into a bad one."""
        self.tasks.remove(task)
        self.bad[task.name] = error

    def require_some(self) -> None:
        """Raise `UserError` if no task is usable: the error of the only task, or all errors."""
        problems = list(self.bad.values())
        if not self.tasks:
            where = str(self.fetched.source)
            raise problems[0] if len(problems) == 1 else BadTasksError(problems, total=self.total, where=where)


def report_progress(line: str) -> None:
    """Print to stderr, so that stdout holds only the command's result."""
    print(line, file=sys.stderr)


def load_subset(source: TaskSource, subset: TaskSubset) -> LoadedTasks:
    """Load the tasks of a subset; a source that is not on this machine is fetched.

    Raises:
        UserError: The source does not exist or cannot be fetched, no name matches, or a fetched task was changed.
    """
    fetched = fetch(source, report_progress=report_progress)
    lock, root = fetched.lock, fetched.folder
    broken = lock.unreadable if lock else {}
    folders = find_folders(root, subset.include, subset.exclude, broken)
    found = read_tasks({name: folders[name] for name in subset.pick(list(folders))}, root, broken)
    if lock is not None:
        lock.verify(found.tasks, root.parent)
    loaded = LoadedTasks(fetched, found.tasks, found.problems, subset.skip_bad)
    for task in list(found.tasks):
        if error := _refusal(task):
            loaded.leave_out(task, error)
    loaded.bad = dict(sorted(loaded.bad.items()))
    return loaded


def _refusal(task: TaskRef) -> UserError | None:
    """Return Harbor's error on a task.toml; None if Harbor accepts it."""
    try:
        with reading_task(task.path):
            harbor_config(task)
    except UserError as error:
        return error
    return None
