"""Finds the task of a request on this machine, by its content.

A request names the task's folder on the machine that loaded the tasks. On another machine the folder may be missing, or
have other files. `harbortrainer serve-env` therefore lists the tasks of this machine for its workers.

Invariant: a trial is played from files that have the hash of the request's task when this process first uses them.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from harbortrainer.errors import UserError
from harbortrainer.runs.durable import write_whole
from harbortrainer.tasks.content_key import content_key

LOCAL_TASKS_VARIABLE = "HARBORTRAINER_LOCAL_TASKS"
"""Environment variable with the path of the list of this machine's tasks."""


class OtherTaskError(UserError):
    """This machine has the task not at all, or with other files."""


class LocalTasks:
    """The tasks of this machine.

    Args:
        folders: Folder of each task, by the hash of its content. Tasks at the path of their request need no entry.
    """

    def __init__(self, folders: Mapping[str, str]) -> None:
        self._folders = folders
        self._found: dict[tuple[str, str], Path] = {}

    @classmethod
    def of_process(cls) -> Self:
        """Return the tasks that this process was started with."""
        listed = os.environ.get(LOCAL_TASKS_VARIABLE)
        return cls(json.loads(Path(listed).read_text(encoding="utf-8")) if listed else {})

    def write(self, file: Path) -> None:
        """Write the list for `of_process`."""
        write_whole(file, json.dumps(dict(self._folders)))

    def find(self, name: str, path: str, key: str) -> Path:
        """Return the folder of a task. The first call for a task reads all its files.

        Args:
            name: The task's name, for messages.
            path: Its folder in the request.
            key: The hash of its content.

        Raises:
            OtherTaskError: No folder has this content.
        """
        if (path, key) not in self._found:
            candidates = [path, *([self._folders[key]] if key in self._folders else [])]
            folder = next((folder for folder in candidates if _key_of(folder) == key), None)
            if folder is None:
                where = f"task {name!r}"
                do = "copy the folder from the machine that trains, and start this server again"
                what = f"has other files in {path}" if Path(path).is_dir() else f"is missing: there is no folder {path}"
                raise OtherTaskError(f"{what} on {os.uname().nodename}", where=where, do=do)
            self._found[path, key] = Path(folder)
        return self._found[path, key]


def _key_of(folder: str) -> str | None:
    """Return the hash of a folder's content; None if it cannot be read."""
    try:
        return content_key(Path(folder))
    except (OSError, UserError, UnicodeEncodeError):
        return None
