"""What a task's author says it is about: the tags, category and difficulty of its task.toml."""

import tomllib
from pathlib import Path

from harbortrainer.tasks.task_folder import TASK_FILE


def tags_of(task: Path) -> list[str]:
    """The tags of a task's folder, sorted, with `category:...` and `difficulty:...` where it names them.

    None for a task.toml that cannot be read, which loading the task tells.
    """
    try:
        table = tomllib.loads((task / TASK_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    metadata = table.get("metadata")
    told = metadata if isinstance(metadata, dict) else {}
    listed = told.get("tags")
    tags = {str(tag) for tag in listed} if isinstance(listed, list) else set()
    tags |= {f"{key}:{told[key]}" for key in ("category", "difficulty") if isinstance(told.get(key), str) and told[key]}
    return sorted(tags)
