"""The tasks of a new run file: which of a source's tasks can run, in which sandbox, and which are held out.

Invariants: the sandbox checks are the doctor's, and the split is the one that the run will draw. A task that the run
would refuse is left out by name, with the reason.
"""

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harbortrainer.config.environment_table import AUTO, environment_entry
from harbortrainer.config.plugin import NEAR_COPY, TasksetKeys
from harbortrainer.config.task_source import TaskSource, task_source
from harbortrainer.doctor import docker_daemon, task_checks
from harbortrainer.doctor.refused_tasks import refused_tasks
from harbortrainer.engines.programs import program_output
from harbortrainer.errors import UserError
from harbortrainer.sandbox.images.image_choice import builder_problem
from harbortrainer.sandbox.probe import missing_tools, problem
from harbortrainer.sandbox.task_requirements import TaskRequirements
from harbortrainer.tasks.passed_checks import passed_keys
from harbortrainer.tasks.split import SavedSplit, assign_sides, read_split
from harbortrainer.tasks.task_errors import reading_task
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_listing import task_row
from harbortrainer.tasks.task_store import fetch, load_source

DEFAULT_FOLDER: Path = TasksetKeys.model_fields["tasks_dir"].default
_EVAL_SHARE: float = TasksetKeys.model_fields["eval_share"].default
_SHARES = (_EVAL_SHARE, *(share / 20 for share in range(1, 20)))
_ENOUGH_TASKS = 200
"""Tasks from which the default share is drawn precisely enough."""
ACCESS = "can access this machine"
"""How the reason begins why a task that is not trusted is left out."""


@dataclass(frozen=True)
class SandboxChoice:
    """An environment type with its options, and the reason for it."""

    kind: str
    reason: str
    kwargs: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ChosenTasks:
    """The tasks of a run."""

    source: TaskSource
    """The pinned source."""
    train: list[TaskRef]
    held_out: list[TaskRef]
    """The tasks of the evaluation; empty if none can be held out."""
    split: SavedSplit | None
    """The split; None if no task can be held out."""
    saved: bool
    """Whether the split is saved in the folder of tasks."""
    sandbox: SandboxChoice
    trusted: Sequence[str]
    """Names or patterns of tasks that may access this machine."""
    left_out: dict[str, str]
    """Reason why a task cannot run, by its name."""
    unreadable: list[UserError]
    """Errors of unreadable and duplicate tasks."""
    unchecked: int = 0
    """Tasks left out because they were not checked, or failed, while others passed `tasks check`."""


def choose_tasks(text: str | None, trusted: Sequence[str] = ()) -> ChosenTasks:
    """Read the tasks of a source, choose their sandbox and hold out some.

    Args:
        text: The source; None for the default folder.
        trusted: Names or patterns of tasks that may access this machine.

    Raises:
        UserError: There is no source, or none of its tasks can be read or can run.
    """
    source = fetch(task_source(text or str(_default_folder()))).source
    unreadable: list[UserError] = []
    refused: dict[str, str] = {}
    tasks = load_source(source, skip=unreadable.append)
    for task in tasks:
        try:
            with reading_task(task.path):
                task_row(task, {}, {})
        except UserError as error:
            refused[task.name] = error.what
    sandbox, left_out = choose_sandbox([task for task in tasks if task.name not in refused], trusted)
    left_out |= refused
    kept = [task for task in tasks if task.name not in left_out]
    if not kept:
        name, reason = next(iter(left_out.items()))
        what = f"none of the {len(tasks)} tasks can run here ({name}: {reason})"
        do = f"`harbortrainer tasks check {shlex.quote(str(source))}` checks each task"
        raise UserError(what, where=str(source), do=do)
    passed = passed_keys()
    fit = [task for task in kept if task.key in passed] or kept
    saved = read_split(Path(source.where)) if source.kind == "folder" else None
    split = choose_split(kept, saved, fit)
    sides = {task.name: "train" for task in kept} if split is None else assign_sides(kept, split)
    sides = {task.name: sides[task.name] for task in fit}
    if "train" not in sides.values():
        what, do = "its split leaves no task that can run here to train on", "make another: `harbortrainer tasks split`"
        raise UserError(what, where=str(source), do=do)
    return ChosenTasks(
        source=source,
        train=[task for task in fit if sides[task.name] == "train"],
        held_out=[task for task in fit if sides[task.name] == "eval"],
        split=split,
        saved=saved is not None,
        sandbox=sandbox,
        trusted=trusted,
        left_out=dict(sorted(left_out.items())),
        unreadable=unreadable,
        unchecked=len(kept) - len(fit),
    )


def _default_folder() -> Path:
    if DEFAULT_FOLDER.is_dir():
        return DEFAULT_FOLDER
    do = "pass a folder or a source (docs/tasks.md), or write a first task: `harbortrainer tasks new my-tasks/first`"
    raise UserError(f"no tasks named, and there is no {DEFAULT_FOLDER}", where="harbortrainer init", do=do)


def choose_split(
    tasks: Sequence[TaskRef], saved: SavedSplit | None, fit: Sequence[TaskRef] | None = None
) -> SavedSplit | None:
    """Choose the split that holds out a number of tasks near the default share; None if it cannot hold out any.

    Args:
        tasks: The tasks that can run.
        saved: The split saved in their folder, which overrides any other.
        fit: Those of them that the run uses; by default all.
    """
    if saved is not None:
        return saved
    shares = _SHARES if len(tasks) < _ENOUGH_TASKS else _SHARES[:1]
    used = {task.name for task in tasks if fit is None or task in fit}
    counts = {share: _count_held_out(tasks, used, share) for share in shares}
    usable = [share for share in shares if 0 < counts[share] < len(used)]
    if not usable:
        return None
    best = min(usable, key=lambda share: abs(counts[share] - _EVAL_SHARE * len(used)))
    return SavedSplit(eval_share=best, near_copy=NEAR_COPY)


def _count_held_out(tasks: Sequence[TaskRef], used: set[str], share: float) -> int:
    sides = assign_sides(tasks, SavedSplit(eval_share=share, near_copy=NEAR_COPY))
    return sum(side == "eval" for name, side in sides.items() if name in used)


def choose_sandbox(tasks: Sequence[TaskRef], trusted: Sequence[str]) -> tuple[SandboxChoice, dict[str, str]]:
    """Choose the sandbox that runs the most tasks: `local`, else `auto`, else `docker`.

    Returns:
        The sandbox, and the reason why a task cannot run in it, by the task's name.
    """
    found: list[tuple[SandboxChoice, dict[str, str]]] = []
    for choice in _possible_sandboxes():
        found.append((choice, _left_out(tasks, choice, trusted)))
        if not found[-1][1]:
            break
    return min(found, key=lambda pair: len(pair[1]))


def _possible_sandboxes() -> list[SandboxChoice]:
    """Return the sandboxes that can start on this machine, the fastest first; `docker` if there are none."""
    local, docker = _local_problem(), docker_daemon.daemon()
    choices = []
    if not local:
        kwargs: dict[str, object] = {"image": "host"} if builder_problem() else {}
        root = (
            "on this machine's root filesystem, since no image builder is installed" if kwargs else "without a daemon"
        )
        choices.append(SandboxChoice("local", f"starts in milliseconds, {root}", kwargs))
    if not local and not isinstance(docker, str):
        choices.append(SandboxChoice(AUTO, "local for each task that it supports, else Docker"))
    if not isinstance(docker, str):
        choices.append(SandboxChoice("docker", "local sandboxes cannot run these tasks here"))
    return choices or [SandboxChoice("docker", f"to be installed: {docker}; local sandboxes: {local}")]


def _local_problem() -> str:
    if missing := missing_tools():
        return f"{', '.join(missing)} not found"
    return asyncio.run(problem()) or ""


def _left_out(tasks: Sequence[TaskRef], choice: SandboxChoice, trusted: Sequence[str]) -> dict[str, str]:
    """Return the reason why a task cannot run in a sandbox, by the task's name; unset variables are no reason."""
    variables = task_checks.variables()
    refused = refused_tasks(tasks)
    buildx = program_output("docker", "buildx", "version") is not None
    found = {}
    for task in tasks:
        report = task_checks.inspect_tasks([task], choice.kind, choice.kwargs, variables, trusted)
        reasons = [refused[task.name]] if task.name in refused else []
        reasons += [text.removeprefix(f"{task.name} (").removesuffix(")") for text in report.unsupported]
        reasons += [f"{ACCESS}: {access}" for access in report.exposed.values()]
        in_docker = any(environment_entry(kind).needs_docker for kind in report.placements)
        if in_docker and not buildx and TaskRequirements(task.path).restricts_network:
            reasons.append("restricts its network, which needs docker buildx")
        if reasons:
            found[task.name] = reasons[0]
    return found
