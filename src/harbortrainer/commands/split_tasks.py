"""`harbortrainer tasks split` and `harbortrainer tasks overlap`: what a split holds out, and what two folders share."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from harbortrainer.config.task_source import task_source
from harbortrainer.tasks.near_copies import groups, overlap
from harbortrainer.tasks.split import KeptSplit, Side, keep_split, kept_split, sides_of
from harbortrainer.tasks.task_folder import TaskRef, load_folder
from harbortrainer.tasks.task_store import load_source

SHOWN = 20
"""Groups of near copies that are named."""


def split_tasks(folder: Path, *, eval_share: float, near_copy: float, write: bool) -> int:
    """Say which tasks of a folder are held out, and which count as one; with `write`, keep it beside the tasks."""
    tasks = load_folder(folder)
    kept = kept_split(folder)
    settings = kept or KeptSplit(eval_share=eval_share, near_copy=near_copy)
    sides = sides_of(tasks, settings)
    if kept is not None:
        print(f"{len(kept.tasks)} tasks keep their side: eval_share {kept.eval_share:g}, near_copy {kept.near_copy:g}")
    tell_groups([group for group in groups(tasks, settings.near_copy) if len(group) > 1], sides)
    for task in tasks:
        if sides[task.name] != "train":
            print(f"{sides[task.name]}  {task.name}")
    count = Counter(sides.values())
    print(
        ", ".join(f"{count[side]} {side}" for side in ("train", "eval", "neither") if count[side] or side != "neither")
    )
    if write:
        print(f"kept in {keep_split(folder, tasks, sides, settings)}")
    return 0


def tell_groups(found: Sequence[Sequence[TaskRef]], sides: Mapping[str, Side]) -> None:
    """The tasks that count as one, and their side."""
    for group in found[:SHOWN]:
        names = ", ".join(f"{task.name} ({sides[task.name]})" for task in group[:SHOWN])
        print(f"count as one: {names}{', ...' if len(group) > SHOWN else ''}")
    if len(found) > SHOWN:
        print(f"... {len(found) - SHOWN} more groups of tasks that count as one")


def show_overlap(trained: str, held_out: str, *, near_copy: float) -> int:
    """Print each task of `held_out` that is in `trained` too, with its copy there; 1 when there are any."""
    first, second = load_source(task_source(trained)), load_source(task_source(held_out))
    copies = overlap(first, second, near_copy)
    for found in copies:
        print(found)
    print(f"{len(copies)} of {len(second)} tasks of {held_out} are in {trained} too")
    return 1 if copies else 0
