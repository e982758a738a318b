"""Which tasks passed the check on this machine, by the hash of their content.

Invariant: a task that was changed after its check does not count as checked, since its key is another one.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from harbortrainer.tasks.source import TaskRef

CHECKED = Path("outputs") / "checked_tasks.json"
"""Where `harbortrainer tasks check` keeps the keys of the tasks that passed; relative to where a run starts."""


def passed() -> set[str]:
    """Keys of the tasks that passed the check on this machine."""
    try:
        return set(json.loads(CHECKED.read_text()))
    except (OSError, json.JSONDecodeError):
        return set()


def remember(tasks: Iterable[TaskRef]) -> None:
    """Add tasks that passed."""
    CHECKED.parent.mkdir(parents=True, exist_ok=True)
    CHECKED.write_text(json.dumps(sorted(passed() | {task.key for task in tasks}), indent=1))
