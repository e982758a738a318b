"""`harbortrainer tasks list`, `fetch`, `split` and `overlap`: inspect, download and divide task sets."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG

from rich.cells import cell_len

from harbortrainer.config.task_source import TaskSource, task_source
from harbortrainer.errors import UserError
from harbortrainer.runs.display import plural
from harbortrainer.runs.durable import atomic_folder
from harbortrainer.tasks.measured_rates import read_rates
from harbortrainer.tasks.near_duplicates import copy_groups, overlap
from harbortrainer.tasks.passed_checks import passed_environments
from harbortrainer.tasks.split import SavedSplit, Side, assign_sides, read_split, write_split
from harbortrainer.tasks.task_errors import reading_task
from harbortrainer.tasks.task_folder import TASK_FILE, TaskRef
from harbortrainer.tasks.task_listing import TaskRow, task_row
from harbortrainer.tasks.task_store import TasksLock, make_lock
from harbortrainer.tasks.task_subset import LoadedTasks, TaskSubset, load_subset


def list_tasks(text: str, subset: TaskSubset, *, difficulty: Path | None, as_json: bool) -> int:
    """Print a row for each task, and a line for each bad task.

    Args:
        text: A source of tasks.
        subset: The tasks to list.
        difficulty: Pass rates, as `harbortrainer eval --difficulty` writes them.
        as_json: Print one JSON object instead of a table.
    """
    rates = {} if difficulty is None else read_rates(difficulty).tasks
    loaded = load_subset(task_source(text), subset)
    checked, rows = passed_environments(), []
    for task in list(loaded.tasks):
        try:
            with reading_task(task.path):
                rows.append(task_row(task, checked, rates))
        except UserError as error:
            loaded.leave_out(task, error)
    if as_json:
        found = {"tasks": [row.model_dump() for row in rows], "unreadable": list(map(str, loaded.bad.values()))}
        print(json.dumps(found, indent=1))
    else:
        print_table(rows, measured=difficulty is not None)
        print_bad(loaded)
    return loaded.exit_code


def print_bad(loaded: LoadedTasks) -> None:
    """Print a line for each bad task."""
    for name, error in loaded.bad.items():
        print(plain(f"BAD  {name}  {error}"))


def print_table(rows: Sequence[TaskRow], *, measured: bool) -> None:
    """Print the rows as a table."""
    heads = ["task", "steps", "verifier", "image", "network", "resources", "agent s", "verifier s", "checked"]
    lines = [
        [*heads, *["pass rate"] * measured],
        *(list(map(plain, cells(row)))[: len(heads) + measured] for row in rows),
    ]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines:  # rich's table takes 0.5 ms a row
        padded = (_pad(text, width, head) for text, width, head in zip(line, widths, lines[0], strict=True))
        print("  ".join(padded).rstrip())
    print(f"{plural(len(rows), 'task')}, {sum(bool(row.checked) for row in rows)} checked")
    if exposed := [row for row in rows if row.exposure]:
        print(f"{len(exposed)} of them can access this machine, and are refused unless they are trusted:")
        for row in exposed:
            print(plain(f"  {row.name}: {'; '.join(row.exposure)}"))


def _pad(text: str, width: int, head: str) -> str:
    """Pad a cell to the width of its column; numbers are aligned to the right."""
    space = " " * (width - cell_len(text))
    return space + text if head in ("steps", "agent s", "verifier s", "pass rate") else text + space


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
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def fetch_tasks(text: str, subset: TaskSubset, to: Path | None) -> int:
    """Fetch a source, copy its tasks to a folder if one is given, and print the line for a run file.

    Args:
        text: The source.
        subset: The tasks to read and copy.
        to: Folder for the copy and its lock file; must not exist, or be empty.

    Raises:
        UserError: The source cannot be fetched, none of its tasks can be used, or `to` is not empty.
    """
    if to is not None:
        refuse_nonempty(to)
    loaded = load_subset(task_source(text), subset)
    loaded.require_some()
    print_bad(loaded)
    fetched = loaded.fetched
    if to is not None:
        copy(fetched.folder, make_lock(str(fetched.source), loaded.tasks, {}), to)
    of = f"{len(loaded.tasks)} of " if loaded.bad else ""
    print(f"{of}{plural(loaded.total, 'task')} in {to or fetched.folder}")
    print(f'dataset = "{fetched.source}"' if to is None and fetched.lock else f'tasks_dir = "{to or fetched.folder}"')
    return loaded.exit_code


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


def split_tasks(folder: Path, subset: TaskSubset, *, eval_share: float, near_copy: float, write: bool) -> int:
    """Print a folder's held-out tasks and near copies; with `write`, save the split next to the tasks."""
    loaded = load_subset(TaskSource("folder", str(folder)), subset)
    tasks = loaded.tasks
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
    print_bad(loaded)
    return loaded.exit_code


def print_near_copies(found: Sequence[Sequence[TaskRef]], sides: Mapping[str, Side]) -> None:
    """Print each group of near copies with the side of each task."""
    for group in found[:SHOWN]:
        names = ", ".join(f"{task.name} ({sides[task.name]})" for task in group[:SHOWN])
        print(f"near copies: {names}{', ...' if len(group) > SHOWN else ''}")
    if len(found) > SHOWN:
        print(f"... {len(found) - SHOWN} more groups of near copies")


def show_overlap(trained: str, held_out: str, subset: TaskSubset, *, near_copy: float) -> int:
    """Print each task of `held_out` with a copy in `trained`; returns 1 when there are any.

    Args:
        trained: Source of the training tasks.
        held_out: Source of the evaluation tasks.
        subset: The evaluation tasks to compare; bad tasks are skipped in both sources.
        near_copy: Similarity from which two tasks are near copies.
    """
    first = load_subset(task_source(trained), TaskSubset(skip_bad=subset.skip_bad))
    second = load_subset(task_source(held_out), subset)
    copies = overlap(first.tasks, second.tasks, near_copy)
    for found in copies:
        print(found)
    print(f"{len(copies)} of {len(second.tasks)} tasks of {held_out} are copies of tasks in {trained}")
    for loaded in (first, second):
        print_bad(loaded)
    return max(first.exit_code, second.exit_code, 1 if copies else 0)
