"""`harbortrainer tasks new`: write the folder of a first task, a working example to change."""

import os
import re
import shlex
import shutil
from pathlib import Path

from harbortrainer.errors import UserError
from harbortrainer.runs.durable import atomic_folder
from harbortrainer.tasks.task_folder import TASK_FILE

EXAMPLE = Path(__file__).parents[1] / "tasks" / "new_task"
"""The example task. It passes `tasks check` with all cheats."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
"""Valid last part of a `task.name` of Harbor."""


def new_task(folder: Path) -> int:
    """Copy the example task to a new folder, name it after the folder, and print the next commands.

    Raises:
        UserError: The folder exists and is not empty, or Harbor does not accept its name.
    """
    folder = Path(os.path.normpath(folder))
    name = folder.absolute().name
    if not _NAME.fullmatch(name) or ".." in name:
        do = "use letters, digits, '-', '_' and '.'"
        raise UserError(f"{name!r} is no name that Harbor accepts", where=str(folder), do=do)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError("already exists", where=str(folder), do="pass a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as fresh:
        shutil.copytree(EXAMPLE, fresh, dirs_exist_ok=True, copy_function=shutil.copyfile)
        task_file = fresh / TASK_FILE
        task_file.write_text(task_file.read_text(encoding="utf-8").replace("me/NAME", f"me/{name}"), encoding="utf-8")
    print(f"wrote {folder}, a working example: change its instruction, environment, solution and tests")
    quoted = shlex.quote(str(folder))
    print(f"next:\n  harbortrainer tasks check {quoted}\n  harbortrainer rollout {quoted} --agent oracle")
    return 0
