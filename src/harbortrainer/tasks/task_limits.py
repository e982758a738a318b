"""The tasks that a run plays, and the time that they give their agents."""

import tomllib
from collections.abc import Iterable, Mapping

from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.errors import UserError
from harbortrainer.tasks.longest_trial import agent_s
from harbortrainer.tasks.measured_rates import within_rates
from harbortrainer.tasks.split import on_side
from harbortrainer.tasks.task_folder import TASK_FILE, TaskRef
from harbortrainer.tasks.task_store import is_here, load_source


def played_by(tasksets: Mapping[str, TasksetKeys]) -> dict[str, list[TaskRef]]:
    """The tasks of each taskset, by its key; a folder is read once.

    None where they cannot be read, which another check tells.
    """
    folders: dict[str, list[TaskRef]] = {}
    found: dict[str, list[TaskRef]] = {}
    for key, table in tasksets.items():
        folder = table.model_dump_json(include={"tasks_dir", "dataset", "include", "exclude"})
        try:
            if folder not in folders:
                folders[folder] = on_disk(table)
            found[key] = within_rates(on_side(folders[folder], table), table)
        except UserError:
            found[key] = []
    return found


def on_disk(table: TasksetKeys) -> list[TaskRef]:
    """All tasks that a taskset may play; none while they are not on this machine. Raises as `load_source`."""
    if not is_here(table.source):
        return []
    return load_source(table.source, table.include, table.exclude, skip=lambda error: None)


def agent_seconds(tasks: Iterable[TaskRef]) -> list[float]:
    """Seconds that the agent of each task has over all its steps, before any multiplier; infinite where none is set."""
    tables = (tomllib.loads((task.path / TASK_FILE).read_text(encoding="utf-8")) for task in tasks)
    return [agent_s(table) for table in tables]
