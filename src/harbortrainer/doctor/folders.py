"""The folders of a run: tasks that load, a run folder that is free or the run's own, and room on the disk."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor.finding import Finding, green, red, yellow
from harbortrainer.doctor.gpus import parameters
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.errors import UserError
from harbortrainer.runs.folder import RunFolder
from harbortrainer.tasks.measured_rates import read_rates, unmeasured, within_rates
from harbortrainer.tasks.task_folder import BadTasksError, TaskRef
from harbortrainer.tasks.task_store import is_here, load_source

GIB = 1024**3
LITTLE_GIB = {"docker": 20, "local": 2}
"""Free disk below this is told: images and trials of Docker, layers and trials of the local sandbox."""

CHECKPOINTS, CHECKPOINT_BYTES = 3, 14
"""Of a run that trains every weight: two that are kept and one that is being written; bytes a parameter of each."""

RED_SHARE = 0.1
DOCKER_ROOT = Path("/var/lib/docker")


def check_tasks(plan: LaunchPlan) -> Iterator[Finding]:
    """Each source of tasks once; those that were not checked in one line."""
    seen: list[TasksetKeys] = []
    tasks: dict[str, list[TaskRef]] = {}
    for key, table in plan.tasksets.items():
        if table in seen:
            continue
        seen.append(table)
        where = plan.where(f"{key}.{'tasks_dir' if table.dataset is None else 'dataset'}")
        left_out: list[UserError] = []
        source = str(table.source)
        try:
            if not is_here(table.source):
                do = f"the run fetches it when it starts; `harbortrainer tasks fetch {source}` does now"
                yield yellow("tasks", f"{source} is not on this machine yet", do, where)
                continue
            found = load_source(table.source, table.include, table.exclude, skip=left_out.append)
        except BadTasksError as errors:
            left_out, found = errors.problems, []
        except UserError as error:
            yield red("tasks", f"{error.where}: {error.what}", error.do, where)
            continue
        for error in left_out:
            level = yellow if table.skip_bad and found else red
            yield level("tasks", f"{error.where}: {error.what}", error.do, where)
        yield from measured(table, found, plan.where(f"{key}.difficulty"))
        if source not in tasks:
            count = f"{len(found)} of {len(found) + len(left_out)}" if left_out else f"{len(found)}"
            yield green("tasks", f"{source}: {count} load")
        tasks.setdefault(source, []).extend(found)
    yield from unchecked(tasks)


def measured(table: TasksetKeys, found: list[TaskRef], where: str) -> Iterator[Finding]:
    """What a taskset's measured pass rates leave of its tasks."""
    if table.difficulty is None or not found:
        return
    try:
        unknown = unmeasured(found, read_rates(table.difficulty).tasks)
        chosen = within_rates(found, table)
    except UserError as error:
        yield red("pass rates", f"{error.where}: {error.what}", error.do, where)
        return
    what = f"{len(chosen)} of {len(found)} tasks of {table.source} are played by their measured pass rate"
    if unknown:
        do = f"measure them too: `harbortrainer eval {table.source} --difficulty FILE ...`"
        yield yellow("pass rates", f"{what}; {len(unknown)} were not measured", do, where)
    else:
        yield green("pass rates", what)


def unchecked(tasks: dict[str, list[TaskRef]]) -> Iterator[Finding]:
    """Sources with tasks that never passed the check here."""
    from harbortrainer.tasks.task_check import passed

    good = passed()
    folders = [source for source, found in tasks.items() if any(task.key not in good for task in found)]
    if folders:
        what = f"not all tasks of {', '.join(folders)} were checked on this machine"
        yield yellow("tasks", what, "`harbortrainer tasks check DIR` runs oracle and nop on each")


def check_run_folder(plan: LaunchPlan) -> Iterator[Finding]:
    """A new run has a folder of its own; a resumed one finds its own. Prime-RL looks after its folders itself."""
    run = plan.run
    if not isinstance(run, RunConfig) or (run.clean and not plan.resume):
        return
    try:
        RunFolder.checked(run.output_dir, run.run.dir, config_text=run.resolved(), resume=plan.resume)
    except UserError as error:
        yield red("run folder", f"{error.where}: {error.what}", error.do, plan.where("run.name"))


def check_disk(plan: LaunchPlan) -> Iterator[Finding]:
    """Room for trials, checkpoints and images."""
    folder = existing(plan.run.run_dir if plan.run else Path.cwd())
    where = plan.where("output_dir") if plan.run else ""
    if os.access(folder, os.W_OK):
        yield disk("disk for the run", folder, LITTLE_GIB["local"] + checkpoints_gib(plan), where)
    else:
        yield red("disk for the run", f"{folder} cannot be written to", "set output_dir to a folder of your own", where)
    # The daemon writes its images there; an ordinary user need not.
    if "docker" in plan.environment_types and DOCKER_ROOT.is_dir():
        yield disk("disk for images", DOCKER_ROOT, LITTLE_GIB["docker"])


def checkpoints_gib(plan: LaunchPlan) -> float:
    """What the checkpoints of every weight take; 0 for those of a LoRA, which are small."""
    run = plan.run
    if not isinstance(run, RunConfig) or run.lora is not None or run.warmup is not None:
        return 0.0
    return CHECKPOINTS * CHECKPOINT_BYTES * (parameters(run.model.name) or 0.0) / GIB


def disk(about: str, folder: Path, little_gib: float, where: str = "") -> Finding:
    """Free space of the disk that a folder lies on."""
    free = shutil.disk_usage(folder).free / GIB
    what = f"{free:.1f} GiB free at {folder}"
    if free < little_gib * RED_SHARE:
        return red(
            about, what, f"free {little_gib:.3g} GiB" + (", or set output_dir elsewhere" if where else ""), where
        )
    if free < little_gib:
        return yellow(about, what, f"{little_gib:.3g} GiB are safer", where)
    return green(about, what)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
