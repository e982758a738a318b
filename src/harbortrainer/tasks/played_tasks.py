"""From a taskset's table to the tasks that are played: its source, then the patterns, the side, the check, the rates.

Invariant: both engines, the plugin and what a run writes down about itself ask here, so that they speak of the same
tasks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.errors import UserError
from harbortrainer.tasks.measured_rates import within_rates
from harbortrainer.tasks.split import on_side
from harbortrainer.tasks.task_check import passed
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_store import load_source


@dataclass(frozen=True)
class PlayedTasks:
    """What a taskset plays."""

    source: str
    """Where the tasks come from, as a run file says it."""
    tasks: list[TaskRef]
    """In the order of their names."""
    left_out: list[str]
    """What `skip_bad` left out, and why, a line each."""

    @property
    def keys(self) -> dict[str, str]:
        """The content hash of every task, by name."""
        return {task.name: task.key for task in self.tasks}


def played_tasks(table: TasksetKeys, *, tell: Callable[[str], None] = print) -> PlayedTasks:
    """The tasks of a taskset, fetched when they are not here yet.

    Args:
        table: The taskset.
        tell: Told before something is fetched.

    Raises:
        UserError: They cannot be had or read, or none is left; names the file and the key.
    """
    left_out: list[str] = []

    def skip(error: UserError) -> None:
        left_out.append(str(error))

    skipping = skip if table.skip_bad else None
    tasks = on_side(load_source(table.source, table.include, table.exclude, skip=skipping, tell=tell), table)
    if table.checked_only:
        tasks = _checked(tasks, str(table.source))
    return PlayedTasks(str(table.source), within_rates(tasks, table), left_out)


def _checked(tasks: list[TaskRef], source: str) -> list[TaskRef]:
    good = passed()
    chosen = [task for task in tasks if task.key in good]
    if not chosen:
        do = f"run `harbortrainer tasks check {source}`, or leave out checked_only"
        raise UserError("none of these tasks passed the check as it is now", where=source, do=do)
    return chosen
