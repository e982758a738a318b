"""The two sides of a folder of tasks: what is trained on, and what is held out.

A task's side is drawn from its instruction and its tests, not from its name. Tasks that count as one (`near_copies`)
are on one side. Invariants: adding tasks moves no task to the other side but one that a new task is a near copy of;
with a kept split (`SPLIT_FILE`) not even that one, and a new task that would tie both sides together is on neither.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.errors import UserError
from harbortrainer.tasks.likeness import words
from harbortrainer.tasks.near_copies import groups, tests_key
from harbortrainer.tasks.task_folder import TaskRef

SPLIT_FILE = "split.json"
"""In the folder of the tasks: the split that `harbortrainer tasks split --write` keeps."""

type Side = Literal["train", "eval", "neither"]


class KeptTask(BaseModel):
    """A task as it was when its side was kept."""

    key: str
    """Hash of its content."""
    side: Side


class KeptSplit(BaseModel):
    """A split that stays as it is when tasks are added."""

    eval_share: float = Field(gt=0, lt=1)
    near_copy: float = Field(gt=0, le=1)
    tasks: dict[str, KeptTask] = {}
    """By name."""


def kept_split(folder: Path) -> KeptSplit | None:
    """The split that lies beside the tasks, none where there is none.

    Raises:
        UserError: It cannot be read.
    """
    file = folder / SPLIT_FILE
    try:
        return KeptSplit.model_validate_json(file.read_bytes()) if file.is_file() else None
    except (OSError, ValidationError) as error:
        why = str(error).splitlines()[0]
        do = "restore it, or write it anew with `harbortrainer tasks split --write`"
        raise UserError(f"no split that can be read: {why}", where=str(file), do=do) from None


def keep_split(folder: Path, tasks: Sequence[TaskRef], sides: Mapping[str, Side], settings: KeptSplit) -> Path:
    """Write the split beside the tasks; tasks that are not there now stay in it."""
    now = {task.name: KeptTask(key=task.key, side=sides[task.name]) for task in tasks}
    file = folder / SPLIT_FILE
    whole = settings.model_copy(update={"tasks": settings.tasks | now})
    file.write_text(json.dumps(whole.model_dump(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return file


def on_side(tasks: Sequence[TaskRef], table: TasksetKeys) -> list[TaskRef]:
    """The tasks that are on the side that a taskset plays.

    Args:
        tasks: All tasks of its folder that it may play.
        table: The taskset; a split that is kept in its folder decides, with its own share and likeness.

    Raises:
        UserError: A kept split that cannot be read, or nothing is on that side.
    """
    if table.split == "all":
        return list(tasks)
    drawn = KeptSplit(eval_share=table.eval_share, near_copy=table.near_copy)
    sides = sides_of(tasks, (kept_split(table.tasks_dir) if table.dataset is None else None) or drawn)
    chosen = [task for task in tasks if sides[task.name] == table.split]
    if not chosen:
        what = f"none of the {len(tasks)} tasks is on the side {table.split!r} of the split"
        do = "change eval_share or near_copy; `harbortrainer tasks split` shows which tasks count as one"
        raise UserError(what, where=str(table.source), do=do)
    return chosen


def sides_of(tasks: Sequence[TaskRef], kept: KeptSplit) -> dict[str, Side]:
    """The side of each task by its name; one that `kept` knows, by content or else by name, keeps its side."""
    by_key = {task.key: task.side for task in kept.tasks.values()}
    held = {name: kept.tasks[name].side for name in kept.tasks}
    sides = {task.name: side for task in tasks if (side := by_key.get(task.key) or held.get(task.name))}
    if len(sides) == len(tasks):
        return sides
    for group in groups(tasks, kept.near_copy):
        known = Counter(sides[task.name] for task in group if task.name in sides)
        side = _drawn(group, kept.eval_share) if not known else min(known) if len(known) == 1 else "neither"
        for task in group:
            sides.setdefault(task.name, side)
    return sides


def _drawn(group: Sequence[TaskRef], eval_share: float) -> Side:
    """Drawn for the whole group by the member whose hash is smallest, so that a large group is held out no more
    often than a small one."""
    first = min(
        hashlib.sha256(" ".join([*words(task.instruction), tests_key(task)]).encode()).digest() for task in group
    )
    draw = int.from_bytes(hashlib.sha256(first).digest()[:8]) / 2**64
    return "eval" if draw < eval_share else "train"
