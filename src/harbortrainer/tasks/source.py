"""Where tasks come from: a folder of Harbor tasks, read without importing harbor.

A task is a folder with a `task.toml`. Its key is the hash of its content: of every file's path, bytes and
executable bit, so the same task has the same key wherever it lies and a changed task is another task.
Invariant: what is returned is sorted by name, names and keys are unique, and anything wrong with the user's files is a
`UserError` that names the file and the key.
"""

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from harbortrainer.errors import UserError

TASK_FILE = "task.toml"


@dataclass(frozen=True)
class TaskRef:
    """One Harbor task on disk."""

    name: str
    """The folder's name."""
    path: Path
    """The folder, absolute."""
    key: str
    """Hash of the content (64 hex digits)."""
    instruction: str
    """What the agent is told; the instructions of all steps for a multi-step task."""
    n_steps: int
    """Number of steps, 1 for a plain task."""


def load_folder(tasks_dir: Path | str, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[TaskRef]:
    """The tasks of a folder, or the one task when the folder itself is a task.

    Args:
        tasks_dir: Folder whose sub-folders are tasks; hidden folders and `__pycache__` are passed over.
        include: Shell patterns over names; empty means all.
        exclude: Shell patterns over names, applied after `include`.

    Raises:
        UserError: No such folder, no tasks in it, none that match, two that are the same, or one that cannot be read.
    """
    root = Path(tasks_dir)
    if not root.is_dir():
        raise UserError("no such folder of tasks", where=str(root), do="set tasks_dir to a folder of Harbor tasks")
    folders = [root] if (root / TASK_FILE).is_file() else _subfolders(root)
    if not folders:
        raise UserError("no tasks here", where=str(root), do=f"each task is a sub-folder with a {TASK_FILE}")
    chosen = [folder for folder in folders if _matches(folder.resolve().name, include, exclude)]
    if not chosen:
        names = ", ".join(folder.name for folder in folders[:5])
        raise UserError(
            f"none of the {len(folders)} tasks matches include {list(include)} and exclude {list(exclude)}",
            where=str(root),
            do=f"the names are {names}{', ...' if len(folders) > 5 else ''}",
        )
    tasks = [load_task(folder) for folder in chosen]
    _refuse_copies(root, tasks)
    return tasks


def load_task(folder: Path) -> TaskRef:
    """One task, read and hashed. Raises `UserError` when its files are missing or malformed."""
    folder = folder.resolve()
    steps = _step_names(folder / TASK_FILE)
    paths = [folder / "steps" / step / "instruction.md" for step in steps] or [folder / "instruction.md"]
    return TaskRef(
        name=folder.name,
        path=folder,
        key=content_key(folder),
        instruction="\n\n".join(_instruction(path) for path in paths),
        n_steps=max(1, len(steps)),
    )


def content_key(folder: Path) -> str:
    """Hash of every file below `folder`: its relative path, executable bit (or link target) and bytes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).as_posix()):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            digest.update(f"link\0{name}\0{path.readlink()}\0".encode())
        elif path.is_file() and "__pycache__" not in path.parts:
            data = path.read_bytes()
            executable = bool(path.stat().st_mode & 0o100)
            digest.update(f"file\0{name}\0{int(executable)}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _refuse_copies(root: Path, tasks: list[TaskRef]) -> None:
    """Two folders with one content would be one task with twice the weight; Prime-RL refuses them late."""
    seen: dict[str, str] = {}
    for task in tasks:
        if task.key in seen:
            what = f"{seen[task.key]} and {task.name} are the same task"
            raise UserError(what, where=str(root), do="remove one of them, or exclude it by name")
        seen[task.key] = task.name


def _subfolders(root: Path) -> list[Path]:
    return [p for p in sorted(root.iterdir()) if p.is_dir() and not p.name.startswith((".", "__"))]


def _matches(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    wanted = not include or any(fnmatch(name, pattern) for pattern in include)
    return wanted and not any(fnmatch(name, pattern) for pattern in exclude)


def _step_names(path: Path) -> list[str]:
    """Names of the steps in a task.toml (empty for a plain task)."""
    steps = _read_toml(path).get("steps", [])
    if not isinstance(steps, list) or not all(isinstance(s, dict) and isinstance(s.get("name"), str) for s in steps):
        raise UserError("every step needs a name", where=f"{path}: steps", do="write [[steps]] with name = ...")
    return [step["name"] for step in steps]


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        config = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"no {TASK_FILE} in this folder",
            where=str(path.parent),
            do="add one, or exclude the folder by name",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"not valid TOML: {error}", where=str(path), do="correct the file") from None
    for table in ("task", "metadata", "agent", "verifier", "environment", "solution"):
        if not isinstance(config.get(table, {}), dict):
            raise UserError("must be a table", where=f"{path}: {table}", do=f"write [{table}]")
    return config


def _instruction(path: Path) -> str:
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        raise UserError("no instruction.md", where=str(path.parent), do="say there what the agent has to do") from None
    if not text:
        raise UserError("empty", where=str(path), do="say there what the agent has to do")
    return text
