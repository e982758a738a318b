"""Load folders of Harbor tasks without importing harbor.

A task is a folder with a `task.toml`, at any depth; a nested task is named `category/task`. The key of a task hashes
the path, bytes and executable bit of every file. So equal tasks have equal keys, wherever they are.

Invariants: tasks are sorted by name; names and keys are unique. Every problem of the user's files is a `UserError` with
the file and the key, and all problems are reported together.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from harbortrainer.config.table import TomlTable
from harbortrainer.errors import UserError
from harbortrainer.tasks.content_key import MAX_DEPTH, content_key
from harbortrainer.tasks.task_errors import read_text, reading_task
from harbortrainer.tasks.task_values import check_name, check_values

TASK_FILE = "task.toml"
LINKED_DEPTH = 1
"""Levels below a link that are searched for tasks."""
_LFS_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(ext-.*\n)*oid sha256:[0-9a-f]{64}\nsize [0-9]+\n?"
)
_MAX_POINTER_BYTES = 1024
_MAX_NAMED = 3
_SKIP = "correct the others, exclude them by name, or set skip_bad = true"


@dataclass(frozen=True)
class TaskRef:
    """One Harbor task on disk."""

    name: str
    """Path of the task relative to the folder of tasks (`category/task`)."""
    path: Path
    """Absolute path of the task's folder."""
    key: str
    """Hash of the task's content (64 hex digits)."""
    instruction: str
    """Instruction for the agent; for a multi-step task, the instructions of all steps."""
    n_steps: int
    """Number of steps, 1 for a plain task."""
    config: TomlTable = field(repr=False, compare=False)
    """Contents of its task.toml."""


class BadTasksError(UserError):
    """Several tasks of a folder cannot be read: one line per task, then the counts.

    Args:
        problems: The error of each unreadable task.
        total: Number of all tasks.
        where: The folder or source.
    """

    def __init__(self, problems: Sequence[UserError], *, total: int, where: str) -> None:
        self.problems = list(problems)
        self.count = f"{total - len(problems)} of {total} tasks load"
        super().__init__(self.count, where=where, do=_SKIP if total > len(problems) else "correct them")

    def __str__(self) -> str:
        return "\n".join([*map(str, self.problems), super().__str__()])


def load_folder(
    tasks_dir: Path | str,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    skip: Callable[[UserError], None] | None = None,
    broken: Mapping[str, str] | None = None,
) -> list[TaskRef]:
    """Load the tasks of a folder, or the one task if the folder itself is a task.

    Args:
        tasks_dir: Folder with tasks at any depth; hidden folders and folders without a task are ignored.
        include: Shell patterns for names; empty means all.
        exclude: Shell patterns for names, applied after `include`.
        skip: Called with the error of each unreadable or duplicate task, which is then left out.
        broken: Known errors of tasks, by name.

    Raises:
        UserError: There is no such folder, no (matching) task, a duplicate task, or one unreadable task.
        BadTasksError: Several tasks cannot be read.
    """
    root = Path(tasks_dir)
    found = read_tasks(find_folders(root, include, exclude, broken or {}), root, broken or {})
    problems = list(found.problems.values())
    if problems and (skip is None or not found.tasks):
        raise problems[0] if len(problems) == 1 else BadTasksError(problems, total=found.total, where=str(root))
    for error in problems:
        skip(error) if skip else None
    return found.tasks


@dataclass(frozen=True)
class ReadTasks:
    """The readable tasks of a folder, and the errors of the others."""

    tasks: list[TaskRef]
    """Readable tasks, sorted by name; each content once."""
    problems: dict[str, UserError]
    """Errors of the unreadable and duplicate tasks, by name."""

    @property
    def total(self) -> int:
        """Number of all tasks."""
        return len(self.tasks) + len(self.problems)


def find_folders(root: Path, include: Sequence[str], exclude: Sequence[str], broken: Iterable[str]) -> dict[str, Path]:
    """Return the folders of the matching tasks by name, sorted; reads no task.

    Args:
        root: Folder with tasks at any depth, or one task.
        include: Shell patterns for names; empty means all.
        exclude: Shell patterns for names, applied after `include`.
        broken: Names of tasks that have no folder.

    Raises:
        UserError: There is no such folder, or no matching task.
    """
    if not root.is_dir():
        what = "not a folder" if root.exists() else "no such folder"
        raise UserError(what, where=str(root), do="pass a folder of Harbor tasks")
    names = named_folders(root) | {name: root / name for name in broken}
    chosen = {name: folder for name, folder in sorted(names.items()) if _matches(name, include, exclude)}
    if not chosen:
        first = ", ".join(list(names)[:5])
        raise UserError(
            f"none of the {len(names)} tasks matches include {list(include)} and exclude {list(exclude)}",
            where=str(root),
            do=f"tasks here: {first}{', ...' if len(names) > 5 else ''}",
        )
    return chosen


def read_tasks(folders: Mapping[str, Path], root: Path, broken: Mapping[str, str]) -> ReadTasks:
    """Read tasks; a duplicate task counts as a problem, since it would count twice in training and evaluation.

    Args:
        folders: Folders of the tasks by name.
        root: The folder that holds them.
        broken: Known errors of tasks, by name.
    """
    tasks: dict[str, TaskRef] = {}  # by content
    problems: dict[str, UserError] = {}
    for name, folder in folders.items():
        if name in broken:
            problems[name] = UserError(broken[name], where=name, do="exclude it by name")
            continue
        try:
            with reading_task(folder):
                task = load_task(folder, name)
        except UserError as error:
            problems[name] = error
            continue
        if (same := tasks.setdefault(task.key, task)) is not task:
            what = f"{same.name} and {name} are the same task"
            problems[name] = UserError(what, where=str(root), do="remove one of them, or exclude it by name")
    return ReadTasks(list(tasks.values()), problems)


def named_folders(root: Path) -> dict[str, Path]:
    """Return the task folders below `root` by name, sorted. Raises `UserError` if there is none."""
    try:
        folders = [root] if _holds_task(root) else list(_task_folders(root))
    except OSError as error:
        raise _unreadable(error, root) from None
    if not folders:
        raise _no_tasks_error(root)
    return dict(sorted((_name(folder, root), folder) for folder in folders))


def _no_tasks_error(root: Path) -> UserError:
    if not has_old_format(root):
        return UserError("no tasks here", where=str(root), do=f"put each task into a sub-folder with a {TASK_FILE}")
    migrate = f"harbor task migrate -i {shlex.quote(str(root))} -o NEW"
    do = f"convert them with `{migrate}`, then run `harbortrainer tasks check NEW`"
    return UserError(f"{OLD_FORMAT_ONLY} here (task.yaml)", where=str(root), do=do)


OLD_FORMAT_ONLY = "only tasks in Terminal-Bench's format"


def has_old_format(root: Path) -> bool:
    """Whether a folder holds a task in Terminal-Bench's first format."""
    return next(root.rglob("task.yaml"), None) is not None


def load_task(folder: Path, name: str = "") -> TaskRef:
    """Read and hash one task. Raises `UserError` if its files are missing or malformed, or a number is unusable."""
    folder = folder.resolve()
    _check_folder_name(name or folder.name, folder)
    config = _read_toml(folder / TASK_FILE)
    check_values(config, folder / TASK_FILE)
    check_name(config, folder / TASK_FILE)
    steps = _step_names(config, folder / TASK_FILE)
    paths = [folder / "steps" / step / "instruction.md" for step in steps] or [folder / "instruction.md"]
    with suppress(FileNotFoundError):
        _text(folder / ".gitignore")  # Harbor reads it in each trial, to hash the task
    return TaskRef(
        name=name or folder.name,
        path=folder,
        key=_key(folder),
        instruction="\n\n".join(_instruction(path) for path in paths),
        n_steps=max(1, len(steps)),
        config=config,
    )


def has_solution(folder: Path) -> bool:
    """Whether the task has a solution for Harbor's oracle."""
    return any(any(folder.glob(pattern)) for pattern in ("solution/solve.*", "steps/*/solution/solve.*"))


def _check_folder_name(name: str, folder: Path) -> None:
    """Refuse a name that could not be sent as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UserError(f"the name {name!r} is not UTF-8", where=ascii(str(folder)), do="rename the folder") from None


def _key(folder: Path) -> str:
    pointers: list[str] = []

    def find_pointer(name: str, data: bytes) -> None:
        if len(data) < _MAX_POINTER_BYTES and _LFS_POINTER.fullmatch(data):
            pointers.append(name)

    try:
        key = content_key(folder, lambda path: _check_link(path, folder), find_pointer)
    except OSError as error:
        raise _unreadable(error, folder) from None
    except UnicodeEncodeError as error:  # Harbor hashes file names, too
        name = error.object.split("\0")[1]
        raise UserError(f"the file name {name!r} is not UTF-8", where=str(folder), do="rename the file") from None
    if pointers:
        more = f" and {len(pointers) - _MAX_NAMED} more" if len(pointers) > _MAX_NAMED else ""
        what = f"Git LFS pointers instead of the files: {', '.join(pointers[:_MAX_NAMED])}{more}"
        raise UserError(what, where=str(folder), do="install git-lfs and fetch the task again, or run `git lfs pull`")
    return key


def _check_link(path: str, folder: Path) -> None:
    """Refuse a link that holds the task itself or the kernel's files: Harbor hashes what it follows, without end."""
    target = Path(os.path.realpath(path))
    pseudo = any(target.is_relative_to(root) for root in ("/proc", "/sys", "/dev")) and target != Path(os.devnull)
    if target in folder.parents or pseudo:
        what = f"the link leads to {target}"
        raise UserError(what, where=path, do="remove it, or copy the files that the task needs")


def _unreadable(error: OSError, path: Path) -> UserError:
    do = "make it readable for the user who trains" if isinstance(error, PermissionError) else "replace it with a file"
    return UserError(f"cannot be read: {error.strerror}", where=str(error.filename or path), do=do)


def _task_folders(root: Path, above: tuple[Path, ...] = (), left: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the folders below `root` that are tasks or look like tasks.

    Other folders (scripts, notes), links to a parent folder and links inside a task are ignored. Below a link only
    `LINKED_DEPTH` levels are searched, since a link may lead to a whole disk.
    """
    if left < 0:
        return
    above = (*above, root.resolve())
    paths = list(root.iterdir())
    ignores_links = _looks_like_task(root)
    for path in paths:
        if not path.is_dir() or path.name.startswith((".", "__")) or (ignores_links and path.is_symlink()):
            continue
        if not path.is_symlink():
            yield from _task_or_nested(path, above, left - 1)
        elif not any(one.is_relative_to(path.resolve()) for one in above):
            yield from _task_or_nested(path, above, min(left - 1, LINKED_DEPTH))


def _task_or_nested(folder: Path, above: tuple[Path, ...], left: int) -> list[Path]:
    try:
        if _holds_task(folder):
            return [folder]
        inside = list(_task_folders(folder, above, left))
        return inside if any(map(_holds_task, inside)) or not _looks_like_task(folder) else [folder]
    except OSError:
        return [folder]  # it may be a task; loading it reports the error


def _holds_task(folder: Path) -> bool:
    return os.path.isfile(folder / TASK_FILE)  # noqa: PTH113 - pathlib raises without permission


def _looks_like_task(folder: Path) -> bool:
    """Whether a folder has a task.toml or other files that are typical of tasks."""
    parts = sum((folder / part).is_dir() for part in ("environment", "solution", "tests", "steps"))
    return parts > 1 or any((folder / name).is_file() for name in (TASK_FILE, "instruction.md"))


def _name(folder: Path, root: Path) -> str:
    if folder is root:
        return folder.resolve().name
    name, above = os.fspath(folder), os.fspath(root)  # `relative_to` takes ten times as long
    return name if above == "." else name.removeprefix(above).lstrip("/")


def _matches(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    wanted = not include or name in include or any(fnmatch(name, pattern) for pattern in include)
    return wanted and not any(fnmatch(name, pattern) for pattern in exclude)


def _step_names(config: TomlTable, path: Path) -> list[str]:
    """Return the names of the steps in a task.toml; empty for a single-step task."""
    steps = config.get("steps", [])
    if not isinstance(steps, list) or not all(isinstance(s, dict) and isinstance(s.get("name"), str) for s in steps):
        raise UserError("every step needs a name", where=f"{path}: steps", do='write [[steps]] with name = "..."')
    names = [step["name"] for step in steps]
    for name in names:
        if not name or name in (".", "..") or set(name) & set("/\\\0"):
            do = "write the name of the step's folder under steps/"
            raise UserError(f"{name!r} is not a valid step name", where=f"{path}: steps", do=do)
    return names


def _read_toml(path: Path) -> TomlTable:
    try:
        text = read_text(path)
        if text.startswith("\ufeff"):  # Harbor cannot read it either
            raise UserError("begins with a byte order mark", where=str(path), do="save it as UTF-8 without one")
        config = tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(
            f"no {TASK_FILE} in this folder",
            where=str(path.parent),
            do="add one, or exclude the folder by name",
        ) from None
    except (ValueError, RecursionError) as error:  # also for a number of more than 4300 digits
        raise UserError(f"not valid TOML: {error}", where=str(path), do="correct the file") from None
    except OSError as error:
        raise _unreadable(error, path) from None
    for table in ("task", "metadata", "agent", "verifier", "environment", "solution"):
        if not isinstance(config.get(table, {}), dict):
            raise UserError("must be a table", where=f"{path}: {table}", do=f"write [{table}]")
    return config


def _instruction(path: Path) -> str:
    try:
        text = _text(path).strip()
    except FileNotFoundError:
        raise UserError(
            "no instruction.md", where=str(path.parent), do="write there what the agent has to do"
        ) from None
    if not text:
        raise UserError("empty", where=str(path), do="write there what the agent has to do")
    return text


def _text(path: Path) -> str:
    """Read a file that Harbor reads as UTF-8. Raises `FileNotFoundError` if there is none."""
    try:
        return read_text(path)
    except FileNotFoundError:
        raise
    except UnicodeDecodeError:
        raise UserError("not UTF-8 text", where=str(path), do="save it as UTF-8") from None
    except OSError as error:
        raise _unreadable(error, path) from None
