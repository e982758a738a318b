"""Local cache of fetched task sets, and loading the tasks of a source.

    $XDG_CACHE_HOME/harbortrainer/tasks/<name>-<hash of the pinned source>/
      tasks.lock.json   the source, each task's content key, and the errors of unusable tasks
      tasks/            a folder per task

Invariants: a set in the cache is complete. It is fetched into a temporary folder under a file lock and then renamed, so
concurrent processes fetch it once, and the next fetch removes what a killed one left. A cached set whose content has
changed is refused.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from harbortrainer.config.task_source import TaskSource
from harbortrainer.errors import UserError
from harbortrainer.runs.durable import write_whole
from harbortrainer.runs.locks import waiting_lock
from harbortrainer.tasks import harbor_download, parquet_tasks
from harbortrainer.tasks.task_archive import drop_links_above_tasks, inspect_tree, remove_tree
from harbortrainer.tasks.task_errors import reading_task
from harbortrainer.tasks.task_folder import (
    OLD_FORMAT_ONLY,
    TASK_FILE,
    BadTasksError,
    TaskRef,
    has_old_format,
    load_folder,
    load_task,
    named_folders,
)

LOCK_FILE = "tasks.lock.json"


class TasksLock(BaseModel):
    """Source and content hashes of a set of tasks."""

    source: str
    """The pinned source, as it is written in `dataset`."""
    tasks: dict[str, str] = {}
    """Content key (`task_key`) of each task, by name."""
    unreadable: dict[str, str] = {}
    """Errors of the unreadable tasks, by name."""

    def write(self, folder: Path) -> None:
        """Write the lock file into a folder."""
        write_whole(folder / LOCK_FILE, self.model_dump_json(indent=1) + "\n")

    def verify(self, tasks: Iterable[TaskRef], folder: Path) -> None:
        """Raise `UserError` for the first task whose content differs from what was fetched."""
        for task in tasks:
            if self.tasks.get(task.name) != task.key:
                what = f"the task {task.name} differs from what was fetched from {self.source}"
                raise UserError(what, where=str(folder), do=f"remove {folder}; it will be fetched again")


def read_lock(folder: Path) -> TasksLock | None:
    """Read the lock of a folder; None if there is none. Raises `UserError` if it cannot be read."""
    path = folder / LOCK_FILE
    try:
        return TasksLock.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        raise UserError("cannot be read", where=str(path), do=f"remove {folder}; it will be fetched again") from error


def make_lock(source: str, tasks: Iterable[TaskRef], unreadable: Mapping[str, str]) -> TasksLock:
    """Return the lock of tasks with their current content."""
    return TasksLock(source=source, tasks={task.name: task.key for task in tasks}, unreadable=dict(unreadable))


FOLDER = "tasks"


@dataclass(frozen=True)
class FetchedTasks:
    """A set of tasks on this machine."""

    source: TaskSource
    """The pinned source."""
    folder: Path
    """Folder of the tasks."""
    lock: TasksLock | None
    """Lock of the fetched tasks; None for a folder of the user."""


def load_source(
    source: TaskSource,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    skip: Callable[[UserError], None] | None = None,
    report_progress: Callable[[str], None] = print,
) -> list[TaskRef]:
    """Load the tasks of a source; a source that is not on this machine is fetched.

    Args:
        source: Source of the tasks.
        include: Shell patterns for names; empty means all.
        exclude: Shell patterns for names, applied after `include`.
        skip: Called with the error of each unreadable task, which is then left out.
        report_progress: Called with a line before a download.

    Raises:
        UserError: The source does not exist or cannot be fetched, or as `load_folder`.
    """
    found = fetch(source, report_progress=report_progress)
    broken = found.lock.unreadable if found.lock else {}
    tasks = load_folder(found.folder, include, exclude, skip=skip, broken=broken)
    if found.lock is not None:
        found.lock.verify(tasks, found.folder.parent)
    return tasks


def is_available(source: TaskSource) -> bool:
    """Whether a source can be loaded without a download."""
    return source.kind == "folder" or (
        _normalized(source).pinned and read_lock(_cache_entry(_normalized(source))) is not None
    )


def fetch(source: TaskSource, *, report_progress: Callable[[str], None] = print) -> FetchedTasks:
    """Fetch a source's tasks into the cache if they are not there, and return their folder.

    Raises:
        UserError: The source does not exist or cannot be reached, or none of its tasks can be read.
    """
    source = _normalized(source)
    if source.kind == "folder":
        return FetchedTasks(source, Path(source.where), None)
    if not source.pinned:
        source = _pin(source)
    home = _cache_entry(source)
    if not source.pinned or read_lock(home) is None:
        with waiting_lock(home.with_name(f".{home.name}.lock")):
            if not source.pinned or read_lock(home) is None:
                report_progress(f"fetching {source} ...")
                _fetch_into(source, home)
    return FetchedTasks(source, home / FOLDER, read_lock(home))


def tasks_cache() -> Path:
    """`$XDG_CACHE_HOME/harbortrainer/tasks`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser().resolve() / "harbortrainer" / "tasks"


def _normalized(source: TaskSource) -> TaskSource:
    """Turn a folder of parquet files into a `parquet` source, and pin parquet files to the hash of their content."""
    path = Path(source.where)
    rows = source.kind == "folder" and any(any(path.glob(p)) for p in ("*.parquet", "data/*.parquet"))
    if rows and not any(path.rglob(TASK_FILE)):
        source = TaskSource("parquet", f"{source.where.rstrip('/')}/**/*.parquet")
    if source.kind != "parquet":
        return source
    parquet_tasks.require_parquet()
    content = parquet_tasks.content_hash(parquet_tasks.parquet_files(source))
    if source.at not in ("", content):
        raise UserError("content has changed", where=source.where, do="restore the file, or remove the @ and its hash")
    return source.pinned_to(content)


def _pin(source: TaskSource) -> TaskSource:
    if source.kind == "hub":
        parquet_tasks.require_parquet()
        return source.pinned_to(parquet_tasks.newest_revision(source))
    with tempfile.TemporaryDirectory(prefix="harbortrainer-pin-") as scratch:
        return source.pinned_to(harbor_download.pin(source, Path(scratch)))


def _cache_entry(source: TaskSource) -> Path:
    own = source.registry and "://" not in source.registry
    registry = str(Path(source.registry).resolve()) if own else source.registry
    where = "" if source.kind == "parquet" else source.where
    text = "\0".join((source.kind, where, source.at, source.part, registry))
    word = re.sub(r"[^\w.-]+", "-", source.where.rstrip("/").rpartition("/")[2]).strip(".-")[:60]
    return tasks_cache() / f"{word}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _fetch_into(source: TaskSource, home: Path) -> None:
    """Fetch into a temporary folder beside `home` and rename it to `home`, replacing an older one."""
    with _scratch(home) as scratch:
        got, new = scratch / "got", scratch / "new"
        broken = _download(source, got, scratch)
        if (got / TASK_FILE).is_file():  # the source is one task
            got.rename(scratch / "task")
            (scratch / "task").rename(_make_folder(got) / _name_of_one(source))
        lock = _inspect_download(source, got, broken)
        got.rename(_make_folder(new) / FOLDER)
        lock.write(new)
        if home.exists():
            home.rename(scratch / "old")
        new.rename(home)


def _name_of_one(source: TaskSource) -> str:
    """Return the name of a source's only task: its folder's, or its repository's."""
    named = Path(source.part).name or re.split("[/:]", source.where.rstrip("/"))[-1].removesuffix(".git")
    return named.lstrip("._") or "task"


def _make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


@contextmanager
def _scratch(home: Path) -> Generator[Path]:
    """Temporary folder beside `home`, whose lock is held; leftovers of killed fetches are removed first."""
    for left in home.parent.glob(f".{home.name}.*.part"):
        with suppress(OSError):
            remove_tree(left)
    scratch = Path(tempfile.mkdtemp(prefix=f".{home.name}.", suffix=".part", dir=home.parent))
    try:
        yield scratch
    finally:
        with suppress(OSError):
            remove_tree(scratch)


def _download(source: TaskSource, target: Path, scratch: Path) -> dict[str, str]:
    """Fetch into `target` and return the errors of broken tasks, by name."""
    if source.kind in ("git", "registry"):
        harbor_download.download(source, target, scratch)
        return {}
    parquet_tasks.require_parquet()
    on_hub = source.kind == "hub"
    files = parquet_tasks.download_parquet(source, scratch) if on_hub else parquet_tasks.parquet_files(source)
    target.mkdir()
    return parquet_tasks.unpack_rows(files, target)


def _inspect_download(source: TaskSource, folder: Path, broken: Mapping[str, str]) -> TasksLock:
    """Return the lock of a download; an unsafe task is removed, and the lock has its error."""
    drop_links_above_tasks(folder)
    tasks, unreadable = [], dict(broken)
    try:
        names = named_folders(folder)
    except UserError:
        names = {}
    for name, path in names.items():
        try:
            with reading_task(path):
                inspect_tree(path)
        except UserError as error:
            remove_tree(path)
            unreadable[name] = error.what
            continue
        try:
            with reading_task(path):
                tasks.append(load_task(path, name))
        except UserError as error:
            unreadable[name] = error.what
    if not tasks:
        raise _nothing_usable(source, folder, unreadable)
    return make_lock(str(source), tasks, unreadable)


def _nothing_usable(source: TaskSource, folder: Path, unreadable: Mapping[str, str]) -> UserError:
    """Return the error of a download without a usable task; it names each unreadable one."""
    where = str(source)
    if unreadable:
        problems = [UserError(what, where=name, do="correct it at its source") for name, what in unreadable.items()]
        return BadTasksError(problems, total=len(problems), where=where)
    if has_old_format(folder):
        do = "clone it, and convert them with `harbor task migrate -i FOLDER -o NEW`; then pass NEW"
        return UserError(f"{OLD_FORMAT_ONLY} (task.yaml)", where=where, do=do)
    return UserError("has no tasks", where=where, do=f"pass a source whose task folders have a {TASK_FILE}")
