"""Find the tasks with a solution, which a warm-up can learn from. Imports neither torch nor harbor."""

from collections.abc import Callable, Sequence
from pathlib import Path

from harbortrainer.errors import UserError
from harbortrainer.runs.display import name_first
from harbortrainer.tasks.task_folder import TaskRef, load_folder

SOLUTION = "solution/solve.sh"
TRAINING_TASKS = "the training tasks"
"""What messages name where `[warmup]` names no folder."""


def tasks_with_solution(folder: Path, report: Callable[[str], object] = lambda line: None) -> list[TaskRef]:
    """Return the tasks with a single solution; multi-step tasks have one per step and are left out.

    Args:
        folder: Folder of Harbor tasks. Unreadable tasks and duplicates are left out.
        report: Called with one line about the tasks that are left out.

    Raises:
        UserError: No task can be read, or none has a solution.
    """
    bad: list[UserError] = []
    tasks = load_folder(folder, skip=bad.append)
    solved = with_solution(tasks, str(folder), report)
    if bad:
        errors = [f"{error.where}: {error.what}" for error in bad]
        report(f"warm-up: skipping unreadable and duplicate tasks: {name_first(errors)}")
    return solved


def with_solution(
    tasks: Sequence[TaskRef], source: str, report: Callable[[str], object] = lambda line: None
) -> list[TaskRef]:
    """Return the tasks that have a `solution/solve.sh`. Messages call the given tasks `source`.

    Raises:
        UserError: None has a solution.
    """
    solved = [task for task in tasks if (task.path / SOLUTION).is_file()]
    if not solved:
        raise UserError(
            f"no task has a {SOLUTION}", where=source, do="set warmup.tasks to a folder of tasks with solutions"
        )
    if left_out := [task.name for task in tasks if task not in solved]:
        report(f"warm-up: skipping tasks without {SOLUTION}: {name_first(left_out)}")
    return solved
