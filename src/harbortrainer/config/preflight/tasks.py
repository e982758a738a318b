"""The tasks: do they load, and did the oracle and the agent that does nothing get what they should?"""

import json
from collections.abc import Iterator

from harbortrainer.config.preflight.facts import DEFAULT_TASKS, Facts
from harbortrainer.config.preflight.finding import Finding, green, red, yellow
from harbortrainer.errors import UserError
from harbortrainer.tasks.checked import passed
from harbortrainer.tasks.source import TaskRef, load_folder

PLUGIN = "harbor_env"


def check(facts: Facts) -> Iterator[Finding]:
    """Each folder of tasks once; those that were not checked in one line."""
    tasksets = [taskset for taskset in facts.tasksets if taskset.get("id") == PLUGIN]
    unique = {json.dumps(taskset, sort_keys=True, default=str): taskset for taskset in tasksets}
    tasks: dict[str, list[TaskRef]] = {}
    for taskset in unique.values():
        path = str(taskset.get("tasks_dir", DEFAULT_TASKS))
        try:
            found = load_folder(path, taskset.get("include", ()), taskset.get("exclude", ()))
        except UserError as error:
            yield red("tasks", f"{error.where}: {error.what}" if error.where else error.what, error.do)
            continue
        if path not in tasks:
            yield green("tasks", f"{path}: {len(found)} load")
        tasks.setdefault(path, []).extend(found)
    yield from unchecked(tasks)


def unchecked(tasks: dict[str, list[TaskRef]]) -> Iterator[Finding]:
    """Folders with tasks that never passed the check here."""
    good = passed()
    folders = [path for path, found in tasks.items() if any(task.key not in good for task in found)]
    if folders:
        what = f"not all tasks of {', '.join(folders)} were checked on this machine"
        yield yellow("tasks", what, "`harbortrainer tasks check DIR` runs oracle and nop on each")
