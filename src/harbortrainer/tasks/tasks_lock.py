"""What a set of tasks is: a file with the source it came from and the hash of each task's content.

Invariant: a set that was fetched once and reads otherwise now is refused, whoever changed it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from harbortrainer.errors import UserError
from harbortrainer.runs.durable import write_whole
from harbortrainer.tasks.task_folder import TaskRef

LOCK_FILE = "tasks.lock.json"


class TasksLock(BaseModel):
    """A set of tasks, by content."""

    source: str
    """As it is written in `dataset`, pinned."""
    tasks: dict[str, str] = {}
    """Content key (`task_key`) of each task by its name."""
    unreadable: dict[str, str] = {}
    """What is wrong with each of the others."""

    def write(self, folder: Path) -> None:
        """Leave it in a folder."""
        write_whole(folder / LOCK_FILE, self.model_dump_json(indent=1) + "\n")

    def hold(self, tasks: Iterable[TaskRef], folder: Path) -> None:
        """Raise `UserError` for the first of these tasks that is another one than was fetched."""
        for task in tasks:
            if self.tasks.get(task.name) != task.key:
                what = f"the task {task.name} is another one than was fetched from {self.source}"
                raise UserError(what, where=str(folder), do=f"remove {folder}, and it is fetched again")


def read_lock(folder: Path) -> TasksLock | None:
    """The lock of a folder; None where there is none. Raises `UserError` when it cannot be read."""
    path = folder / LOCK_FILE
    try:
        return TasksLock.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        raise UserError("cannot be read", where=str(path), do=f"remove {folder}, and it is fetched again") from error


def lock_of(source: str, tasks: Iterable[TaskRef], unreadable: Mapping[str, str]) -> TasksLock:
    """The lock of tasks as they are now."""
    return TasksLock(source=source, tasks={task.name: task.key for task in tasks}, unreadable=dict(unreadable))
