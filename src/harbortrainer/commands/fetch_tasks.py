"""`harbortrainer tasks fetch`: bring a set of tasks here, and say how a run file names it for good."""

import shutil
from pathlib import Path

from harbortrainer.config.task_source import task_source
from harbortrainer.errors import UserError
from harbortrainer.runs.durable import atomic_folder
from harbortrainer.tasks.task_folder import TASK_FILE, BadTasksError, load_folder
from harbortrainer.tasks.task_store import FetchedTasks, fetch
from harbortrainer.tasks.tasks_lock import TasksLock, lock_of


def fetch_tasks(text: str, to: Path | None) -> int:
    """Fetch a source, with a copy of its tasks in a folder of the user's, and print what a run file would say.

    Args:
        text: The source.
        to: Folder for the copy and its lock; must not be there, or be empty.

    Raises:
        UserError: It cannot be had, or `to` is something else's.
        BadTasksError: Tasks in it that cannot be read; the others are here all the same.
    """
    source = task_source(text)
    if to is not None:
        refuse_other(to)
    found = fetch(source)
    unread: list[UserError] = []
    lock = found.lock or _folder_lock(found, unread)
    unread += [UserError(what, where=name) for name, what in (found.lock.unreadable if found.lock else {}).items()]
    if to is not None:
        copy(found.folder, lock, to)
    print(f"{len(lock.tasks)} tasks in {to or found.folder}")
    print(f'dataset = "{found.source}"' if to is None and found.lock else f'tasks_dir = "{to or found.folder}"')
    if unread:
        raise BadTasksError(unread, of=len(lock.tasks) + len(unread), where=str(source))
    return 0


def _folder_lock(found: FetchedTasks, unread: list[UserError]) -> TasksLock:
    return lock_of(str(found.source), load_folder(found.folder, skip=unread.append), {})


def refuse_other(to: Path) -> None:
    """Raise `UserError` when something is there already, which may be the user's own work."""
    if to.is_file() or (to.is_dir() and any(to.iterdir())):
        raise UserError("is there already", where=str(to), do="name a new folder with --to")


def copy(folder: Path, lock: TasksLock, to: Path) -> None:
    """Put the tasks that can be read, and their lock, into a folder, whole or not at all."""
    to.parent.mkdir(parents=True, exist_ok=True)
    alone = list(lock.tasks) if (folder / TASK_FILE).is_file() else []
    with atomic_folder(to) as fresh:
        for name in lock.tasks:
            shutil.copytree(folder if alone else folder / name, fresh / name, symlinks=True)
        lock.write(fresh)
