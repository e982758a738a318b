"""Select the tasks of a taskset: load the source, then filter by pattern, split, check and pass rate.

Invariant: both engines, the plugin and the run's records use this function, so that they agree on the tasks.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.errors import UserError
from harbortrainer.tasks.measured_rates import filter_by_pass_rate
from harbortrainer.tasks.passed_checks import audited_keys, passed_keys
from harbortrainer.tasks.split import select_side
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_store import load_source


@dataclass(frozen=True)
class TaskSelection:
    """The selected tasks of a taskset."""

    source: str
    """Source of the tasks, as written in a run file."""
    tasks: list[TaskRef]
    """Tasks sorted by name."""
    left_out: list[str]
    """Errors of the tasks that `skip_bad` left out, one line each."""

    @property
    def keys(self) -> dict[str, str]:
        """The content hash of every task, by name."""
        return {task.name: task.key for task in self.tasks}


def select_tasks(table: TasksetKeys, *, report_progress: Callable[[str], None] = print) -> TaskSelection:
    """Load the tasks of a taskset; a source that is not on this machine is fetched.

    Args:
        table: The taskset.
        report_progress: Called with a line before a download.

    Raises:
        UserError: The tasks cannot be fetched or read, or none is left; the message names the file and the key.
    """
    left_out: list[str] = []

    def skip(error: UserError) -> None:
        left_out.append(str(error))

    skipping = skip if table.skip_bad else None
    tasks = select_side(
        load_source(table.source, table.include, table.exclude, skip=skipping, report_progress=report_progress), table
    )
    return TaskSelection(str(table.source), filter_by_pass_rate(checked_tasks(tasks, table), table), left_out)


def checked_tasks(tasks: list[TaskRef], table: TasksetKeys) -> list[TaskRef]:
    """Return the tasks that passed the checks which the taskset asks for.

    Raises:
        UserError: None passed.
    """
    if table.checked_only:
        tasks = _passed(tasks, passed_keys(), "check", "checked_only", str(table.source))
    if table.audited:
        tasks = _passed(tasks, audited_keys(), "audit", "audited", str(table.source))
    return tasks


def _passed(tasks: list[TaskRef], good: set[str], command: str, key: str, source: str) -> list[TaskRef]:
    chosen = [task for task in tasks if task.key in good]
    if not chosen:
        do = f"run `harbortrainer tasks {command} {shlex.quote(source)}`, or remove {key}"
        raise UserError(f"none of these tasks passed the {command} with its current content", where=source, do=do)
    return chosen
