"""Whether an evaluation measures what is trained on, and whether both sides of a split hold tasks."""

from collections.abc import Iterator

from harbortrainer.doctor.finding import Finding, green, red, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.errors import UserError
from harbortrainer.tasks.near_copies import Copies, overlap
from harbortrainer.tasks.split import on_side
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_limits import on_disk

ABOUT = "evaluation"
SHOWN = 3
"""Pairs of one evaluation that are named."""


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """Each evaluation against everything that is trained on."""
    trained = {
        task.path: task for key, tasks in plan.played.items() if key.startswith("orchestrator.train.") for task in tasks
    }
    for key, held_out in plan.played.items():
        if not held_out:
            yield from empty_side(plan, key)
        elif key.startswith("orchestrator.eval."):
            yield measured(plan, key, list(trained.values()), held_out)


def empty_side(plan: LaunchPlan, key: str) -> Iterator[Finding]:
    """Why a taskset that can be read plays nothing."""
    table = plan.tasksets[key]
    try:
        found = on_disk(table)
    except UserError:
        return  # `folders` tells it
    try:
        on_side(found, table) if found else None
    except UserError as error:
        yield red("tasks", f"{error.where}: {error.what}", error.do, plan.where(f"{key}.split"))


def measured(plan: LaunchPlan, key: str, trained: list[TaskRef], held_out: list[TaskRef]) -> Finding:
    """One evaluation."""
    table = plan.tasksets[key]
    copies = overlap(trained, held_out, table.near_copy)
    if not copies:
        return green(ABOUT, f"none of {len(held_out)} held-out tasks is trained on")
    what = f"{len(copies)} of {len(held_out)} held-out tasks are trained on: {named(copies)}"
    if table.may_overlap:
        return yellow(ABOUT, what, "it shows no more than what was learned by heart", plan.where(f"{key}.may_overlap"))
    do = (
        'exclude them, play split = "train" and "eval" of one folder, or say with near_copy what counts as a copy; '
        "may_overlap = true measures all the same"
    )
    return red(ABOUT, what, do, plan.where(f"{key}.{'tasks_dir' if table.dataset is None else 'dataset'}"))


def named(copies: list[Copies]) -> str:
    """The first pairs."""
    more = f", ... ({len(copies) - SHOWN} more: `harbortrainer tasks overlap`)" if len(copies) > SHOWN else ""
    return ", ".join(map(str, copies[:SHOWN])) + more
