"""Train/eval split of a folder of tasks.

A hash of a task's instruction and tests decides its side, not its name. Near copies (`near_duplicates`) are always on
one side. Invariants: a new task changes the side of an old one only if they are near copies. With a saved split
(`SPLIT_FILE`) no old task changes sides, and a new near copy of tasks on both sides is on neither.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.errors import UserError, first_line
from harbortrainer.tasks.near_duplicates import copy_groups, tests_key, words
from harbortrainer.tasks.task_folder import TaskRef

SPLIT_FILE = "split.json"
"""File in the task folder to which `harbortrainer tasks split --write` saves the split."""

type Side = Literal["train", "eval", "neither"]


class SavedTask(BaseModel):
    """A task of a saved split."""

    key: str
    """Hash of the task's content when the split was saved."""
    side: Side


class SavedSplit(BaseModel):
    """A saved split: its tasks keep their sides when tasks are added."""

    eval_share: float = Field(gt=0, lt=1)
    near_copy: float = Field(gt=0, le=1)
    tasks: dict[str, SavedTask] = {}
    """Tasks by name."""


def read_split(folder: Path) -> SavedSplit | None:
    """Read the split saved in a task folder; None if there is none.

    Raises:
        UserError: The file cannot be read.
    """
    file = folder / SPLIT_FILE
    try:
        return SavedSplit.model_validate_json(file.read_bytes()) if file.is_file() else None
    except (OSError, ValidationError) as error:
        do = "restore it, or write it again with `harbortrainer tasks split --write`"
        raise UserError(f"not a readable split: {first_line(error)}", where=str(file), do=do) from None


def write_split(folder: Path, tasks: Sequence[TaskRef], sides: Mapping[str, Side], settings: SavedSplit) -> Path:
    """Save the split in the task folder; entries of removed tasks are kept."""
    now = {task.name: SavedTask(key=task.key, side=sides[task.name]) for task in tasks}
    file = folder / SPLIT_FILE
    whole = settings.model_copy(update={"tasks": settings.tasks | now})
    file.write_text(json.dumps(whole.model_dump(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return file


def select_side(tasks: Sequence[TaskRef], table: TasksetKeys) -> list[TaskRef]:
    """Return the tasks on the side of the split that a taskset uses.

    Args:
        tasks: Candidate tasks of the taskset's folder.
        table: The taskset; a split saved in its folder overrides its `eval_share` and `near_copy`.

    Raises:
        UserError: The saved split cannot be read, or no task is on that side.
    """
    if table.split == "all":
        return list(tasks)
    drawn = SavedSplit(eval_share=table.eval_share, near_copy=table.near_copy)
    sides = assign_sides(tasks, (read_split(table.tasks_dir) if table.dataset is None else None) or drawn)
    chosen = [task for task in tasks if sides[task.name] == table.split]
    if not chosen:
        what = f"none of the {len(tasks)} tasks is on the {table.split!r} side of the split"
        do = "change eval_share or near_copy; `harbortrainer tasks split` shows the groups of near copies"
        raise UserError(what, where=str(table.source), do=do)
    return chosen


def assign_sides(tasks: Sequence[TaskRef], kept: SavedSplit) -> dict[str, Side]:
    """Return the side of each task by name; a task that `kept` has, by content or else by name, keeps its side."""
    by_key = {task.key: task.side for task in kept.tasks.values()}
    held = {name: kept.tasks[name].side for name in kept.tasks}
    sides = {task.name: side for task in tasks if (side := by_key.get(task.key) or held.get(task.name))}
    if len(sides) == len(tasks):
        return sides
    for group in copy_groups(tasks, kept.near_copy):
        known = Counter(sides[task.name] for task in group if task.name in sides)
        side = _draw_side(group, kept.eval_share) if not known else min(known) if len(known) == 1 else "neither"
        for task in group:
            sides.setdefault(task.name, side)
    return sides


def _draw_side(group: Sequence[TaskRef], eval_share: float) -> Side:
    """Draw the side of a group from the smallest hash of its tasks, so that its size does not matter."""
    first = min(
        hashlib.sha256(" ".join([*words(task.instruction), tests_key(task)]).encode()).digest() for task in group
    )
    draw = int.from_bytes(hashlib.sha256(first).digest()[:8]) / 2**64
    return "eval" if draw < eval_share else "train"
