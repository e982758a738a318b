"""The tasks that a warm-up can learn from: those with a solution to type. Read without torch and harbor."""

from collections.abc import Callable
from pathlib import Path

from harbortrainer.errors import UserError
from harbortrainer.tasks.task_folder import TaskRef, load_folder

SOLUTION = "solution/solve.sh"


def solved_tasks(folder: Path, tell: Callable[[str], object] = lambda line: None) -> list[TaskRef]:
    """The tasks that have one solution; a task of several steps has one a step, and is left out.

    Args:
        folder: Of Harbor tasks.
        tell: Told in one line which tasks are left out.

    Raises:
        UserError: The folder's tasks cannot be read, or none has a solution.
    """
    tasks = load_folder(folder)
    solved = [task for task in tasks if (task.path / SOLUTION).is_file()]
    if not solved:
        raise UserError(f"no task has a {SOLUTION}", where=str(folder), do="point warmup.tasks at tasks with solutions")
    if left_out := ", ".join(task.name for task in tasks if task not in solved):
        tell(f"warm-up: left out, since they have no {SOLUTION}: {left_out}")
    return solved
