"""`harbortrainer tasks list`, `fetch`, `split` and `overlap`: inspect, download and divide task sets."""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG

from rich.console import Console
from rich.table import Table

from harbortrainer.config.task_source import task_source
from harbortrainer.errors import UserError
from harbortrainer.runs.durable import atomic_folder
from harbortrainer.tasks.measured_rates import read_rates
from harbortrainer.tasks.near_duplicates import copy_groups, overlap
from harbortrainer.tasks.split import SavedSplit, Side, assign_sides, read_split, write_split
from harbortrainer.tasks.task_check import passed_environments
from harbortrainer.tasks.task_errors import reading_task
from harbortrainer.tasks.task_folder import TASK_FILE, BadTasksError, TaskRef, load_folder
from harbortrainer.tasks.task_listing import TaskRow, task_row
from harbortrainer.tasks.task_store import FetchedTasks, TasksLock, fetch, load_source, make_lock

WIDE = 240
"""Columns of a table that is not printed to a terminal."""


def list_tasks(text: str, *, difficulty: Path | None, as_json: bool) -> int:
    """Print a row for each task, and a line for each unreadable task; returns 1 when there is one of these.

    Args:
        text: A source of tasks.
        difficulty: Pass rates, as `harbortrainer eval --difficulty` writes them.
        as_json: Print one JSON object instead of a table.
    """
    rates = {} if difficulty is None else read_rates(difficulty).tasks
    unreadable: list[UserError] = []
    checked, rows = passed_environments(), []
    for task in load_source(task_source(text), skip=unreadable.append, report_progress=report_progress):
        try:
            with reading_task(task.path):
                rows.append(task_row(task, checked, rates))
        except UserError as error:
            unreadable.append(error)
    if not as_json:
        print_table(rows, measured=difficulty is not None)
        return print_unreadable(unreadable)
    found = {"tasks": [row.model_dump() for row in rows], "unreadable": [str(error) for error in unreadable]}
    print(json.dumps(found, indent=1))
    return 1 if unreadable else 0


def print_unreadable(errors: Sequence[UserError]) -> int:
    """Print a line for each unreadable task; returns 1 when there is one."""
    for error in errors:
        print(plain(f"BAD {error}"))
    return 1 if errors else 0


def report_progress(line: str) -> None:
    """Print to stderr, so that stdout holds only the table or the JSON."""
    print(line, file=sys.stderr)


def print_table(rows: Sequence[TaskRow], *, measured: bool) -> None:
    """Print the rows as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    heads = ["task", "steps", "verifier", "image", "network", "resources", "agent s", "verifier s", "checked"]
    for head in [*heads, *["pass rate"] * measured]:
        table.add_column(head, justify="right" if head in ("steps", "agent s", "verifier s", "pass rate") else "left")
    for row in rows:
        table.add_row(*map(plain, cells(row)[: len(table.columns)]))
    Console(markup=False, width=None if sys.stdout.isatty() else WIDE).print(table)
    print(f"{len(rows)} tasks, {sum(bool(row.checked) for row in rows)} checked")
    if exposed := [row for row in rows if row.exposure]:
        print(f"{len(exposed)} of them can access this machine, and are refused unless they are trusted:")
        for row in exposed:
            print(plain(f"  {row.name}: {'; '.join(row.exposure)}"))


def cells(row: TaskRow) -> list[str]:
    """Return the text of each column of a row."""
    sizes = {"cpu": row.cpus, "MB": row.memory_mb, "MB disk": row.storage_mb, "gpu": row.gpus}
    rate = "-" if row.pass_rate is None else f"{row.pass_rate:.2f} of {row.attempts}"
    return [
        row.name,
        str(row.steps),
        row.verifier,
        row.image or "-",
        row.network,
        ", ".join(f"{size} {unit}" for unit, size in sizes.items() if size is not None) or "-",
        "-" if row.agent_s is None else f"{row.agent_s:g}",
        f"{row.verifier_s:g}",
        ", ".join(row.checked) or "no",
        rate,
    ]


def plain(text: str) -> str:
    """Replace control characters: task names are untrusted text."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def fetch_tasks(text: str, to: Path | None) -> int:
    """Fetch a source, copy its tasks to a folder if one is given, and print the line for a run file.

    Args:
        text: The source.
        to: Folder for the copy and its lock file; must not exist, or be empty.

    Raises:
        UserError: The source cannot be fetched, or `to` is not empty.
        BadTasksError: Some tasks cannot be read; the others were fetched.
    """
    source = task_source(text)
    if to is not None:
        refuse_nonempty(to)
    found = fetch(source)
    unreadable: list[UserError] = []
    lock = found.lock or _folder_lock(found, unreadable)
    unreadable += [UserError(what, where=name) for name, what in (found.lock.unreadable if found.lock else {}).items()]
    if to is not None:
        copy(found.folder, lock, to)
    print(f"{len(lock.tasks)} tasks in {to or found.folder}")
    print(f'dataset = "{found.source}"' if to is None and found.lock else f'tasks_dir = "{to or found.folder}"')
    if unreadable:
        raise BadTasksError(unreadable, total=len(lock.tasks) + len(unreadable), where=str(source))
    return 0


def _folder_lock(found: FetchedTasks, unreadable: list[UserError]) -> TasksLock:
    return make_lock(str(found.source), load_folder(found.folder, skip=unreadable.append), {})


def refuse_nonempty(to: Path) -> None:
    """Raise `UserError` when the path is a file or a folder with content, which may be the user's work."""
    if to.is_file() or (to.is_dir() and any(to.iterdir())):
        raise UserError("already exists", where=str(to), do="pass a new folder with --to")


def copy(folder: Path, lock: TasksLock, to: Path) -> None:
    """Copy the readable tasks and write their lock file, atomically."""
    to.parent.mkdir(parents=True, exist_ok=True)
    is_task = bool(lock.tasks) and (folder / TASK_FILE).is_file()
    with atomic_folder(to) as fresh:
        for name in lock.tasks:
            source = folder if is_task else folder / name
            shutil.copytree(source, fresh / name, symlinks=True, ignore=_special_files)
        lock.write(fresh)


def _special_files(folder: str, names: list[str]) -> list[str]:
    """Return the pipes, sockets and devices; a task's content key leaves them out too."""
    paths = {name: Path(folder, name) for name in names}
    kinds = {name: path.lstat().st_mode for name, path in paths.items()}
    return [name for name, kind in kinds.items() if not (S_ISREG(kind) or S_ISDIR(kind) or S_ISLNK(kind))]


SHOWN = 20
"""Most groups of near copies, and tasks of a group, that are printed."""


def split_tasks(folder: Path, *, eval_share: float, near_copy: float, write: bool) -> int:
    """Print a folder's held-out tasks and near copies; with `write`, save the split next to the tasks.

    Unreadable and duplicate tasks are named and left out; the exit code is then 1.
    """
    unreadable: list[UserError] = []
    tasks = load_folder(folder, skip=unreadable.append)
    kept = read_split(folder)
    settings = kept or SavedSplit(eval_share=eval_share, near_copy=near_copy)
    sides = assign_sides(tasks, settings)
    if kept is not None:
        settings_text = f"eval_share {kept.eval_share:g}, near_copy {kept.near_copy:g}"
        print(f"{len(kept.tasks)} tasks keep their side of the saved split ({settings_text})")
    print_near_copies([group for group in copy_groups(tasks, settings.near_copy) if len(group) > 1], sides)
    for task in tasks:
        if sides[task.name] != "train":
            print(f"{sides[task.name]}  {task.name}")
    count = Counter(sides.values())
    print(
        ", ".join(f"{count[side]} {side}" for side in ("train", "eval", "neither") if count[side] or side != "neither")
    )
    if write:
        print(f"saved to {write_split(folder, tasks, sides, settings)}")
    return print_unreadable(unreadable)


def print_near_copies(found: Sequence[Sequence[TaskRef]], sides: Mapping[str, Side]) -> None:
    """Print each group of near copies with the side of each task."""
    for group in found[:SHOWN]:
        names = ", ".join(f"{task.name} ({sides[task.name]})" for task in group[:SHOWN])
        print(f"near copies: {names}{', ...' if len(group) > SHOWN else ''}")
    if len(found) > SHOWN:
        print(f"... {len(found) - SHOWN} more groups of near copies")


def show_overlap(trained: str, held_out: str, *, near_copy: float) -> int:
    """Print each task of `held_out` with a copy in `trained`; returns 1 when there are any, or unreadable tasks."""
    unreadable: list[UserError] = []
    first, second = (load_source(task_source(text), skip=unreadable.append) for text in (trained, held_out))
    copies = overlap(first, second, near_copy)
    for found in copies:
        print(found)
    print(f"{len(copies)} of {len(second)} tasks of {held_out} are copies of tasks in {trained}")
    return max(print_unreadable(unreadable), 1 if copies else 0)
