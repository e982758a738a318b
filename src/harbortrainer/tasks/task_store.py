"""Sets of tasks that were fetched, kept on this machine, and the one way from a source to its tasks.

    $XDG_CACHE_HOME/harbortrainer/tasks/<name>-<hash of the pinned source>/
      tasks.lock.json   where they came from, and each task's content key
      tasks/            a folder a task

Invariant: a set that is there is complete. It is fetched beside its place under a lock and renamed, so several
processes fetch it once, and what a killed one leaves goes with the next fetch. The lock names
the tasks that cannot be used, and why.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harbortrainer.config.task_source import TaskSource
from harbortrainer.errors import UserError
from harbortrainer.runs.file_lock import waiting_lock
from harbortrainer.tasks import harbor_download, parquet_tasks
from harbortrainer.tasks.task_archive import drop_links_above_tasks, inspect_tree
from harbortrainer.tasks.task_folder import TASK_FILE, TaskRef, load_folder, load_task, named_folders
from harbortrainer.tasks.tasks_lock import TasksLock, lock_of, read_lock

FOLDER = "tasks"


@dataclass(frozen=True)
class FetchedTasks:
    """A set of tasks on this machine."""

    source: TaskSource
    """Pinned."""
    folder: Path
    """Where its tasks are."""
    lock: TasksLock | None
    """What was fetched; None for a folder of the user's."""


def load_source(
    source: TaskSource,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    skip: Callable[[UserError], None] | None = None,
    tell: Callable[[str], None] = print,
) -> list[TaskRef]:
    """The tasks of a source, fetched when they are not here yet.

    Args:
        source: Where they come from.
        include: Shell patterns over names; empty means all.
        exclude: Shell patterns over names, applied after `include`.
        skip: Go on without tasks that cannot be read, and tell this function of each.
        tell: Told before something is fetched.

    Raises:
        UserError: No such source, it cannot be had, or as `load_folder`.
    """
    found = fetch(source, tell=tell)
    broken = found.lock.unreadable if found.lock else {}
    tasks = load_folder(found.folder, include, exclude, skip=skip, broken=broken)
    if found.lock is not None:
        found.lock.hold(tasks, found.folder.parent)
    return tasks


def is_here(source: TaskSource) -> bool:
    """Whether loading a pinned source would fetch nothing."""
    return source.kind == "folder" or (_settled(source).pinned and read_lock(_home(_settled(source))) is not None)


def fetch(source: TaskSource, *, tell: Callable[[str], None] = print) -> FetchedTasks:
    """Bring a source's tasks onto this machine, once, and say where they are.

    Raises:
        UserError: There is no such source, it cannot be reached, or none of its tasks can be read.
    """
    source = _settled(source)
    if source.kind == "folder":
        return FetchedTasks(source, Path(source.where), None)
    if not source.pinned:
        source = _pinned(source)
    home = _home(source)
    if not source.pinned or read_lock(home) is None:
        with waiting_lock(home.with_name(f".{home.name}.lock")):
            if not source.pinned or read_lock(home) is None:
                tell(f"fetching {source} ...")
                _fill(source, home)
    return FetchedTasks(source, home / FOLDER, read_lock(home))


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/harbortrainer/tasks`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser().resolve() / "harbortrainer" / "tasks"


def _settled(source: TaskSource) -> TaskSource:
    """A folder of parquet files stands for these, and what parquet files are is told by what they hold."""
    path = Path(source.where)
    rows = source.kind == "folder" and any(any(path.glob(p)) for p in ("*.parquet", "data/*.parquet"))
    if rows and not any(path.rglob(TASK_FILE)):
        source = TaskSource("parquet", f"{source.where.rstrip('/')}/**/*.parquet")
    if source.kind != "parquet":
        return source
    parquet_tasks.need_parquet()
    content = parquet_tasks.content_of(parquet_tasks.parquet_files(source))
    if source.at not in ("", content):
        raise UserError("holds other tasks than it did", where=source.where, do="put it back as it was, or drop the @")
    return source.pinned_to(content)


def _pinned(source: TaskSource) -> TaskSource:
    if source.kind == "hub":
        parquet_tasks.need_parquet()
        return source.pinned_to(parquet_tasks.newest_revision(source))
    with tempfile.TemporaryDirectory(prefix="harbortrainer-pin-") as scratch:
        return source.pinned_to(harbor_download.pin(source, Path(scratch)))


def _home(source: TaskSource) -> Path:
    own = source.registry and "://" not in source.registry
    registry = str(Path(source.registry).resolve()) if own else source.registry
    where = "" if source.kind == "parquet" else source.where
    text = "\0".join((source.kind, where, source.at, source.part, registry))
    word = re.sub(r"[^\w.-]+", "-", source.where.rstrip("/").rpartition("/")[2]).strip(".-")[:60]
    return cache_folder() / f"{word}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _fill(source: TaskSource, home: Path) -> None:
    """Fetch into a folder beside `home` and rename it; an older one there goes."""
    with _scratch(home) as scratch:
        got, new = scratch / "got", scratch / "new"
        broken = _download(source, got, scratch)
        if (got / TASK_FILE).is_file():  # the source is one task
            got.rename(scratch / "task")
            (scratch / "task").rename(_made(got) / (Path(source.part).name or "task"))
        lock = _examined(source, got, broken)
        got.rename(_made(new) / FOLDER)
        lock.write(new)
        if home.exists():
            home.rename(scratch / "old")
        new.rename(home)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@contextmanager
def _scratch(home: Path) -> Generator[Path]:
    """A folder beside `home`, whose lock we hold. It is gone afterwards; what a killed fetch left is gone before."""
    for left in home.parent.glob(f".{home.name}.*.part"):
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{home.name}.", suffix=".part", dir=home.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(source: TaskSource, target: Path, scratch: Path) -> dict[str, str]:
    """Fetch into `target`; what is wrong with single tasks, by name."""
    if source.kind in ("git", "registry"):
        harbor_download.download(source, target, scratch)
        return {}
    parquet_tasks.need_parquet()
    on_hub = source.kind == "hub"
    files = parquet_tasks.download_parquet(source, scratch) if on_hub else parquet_tasks.parquet_files(source)
    target.mkdir()
    return parquet_tasks.unpack_rows(files, target)


def _examined(source: TaskSource, folder: Path, broken: Mapping[str, str]) -> TasksLock:
    """The lock of what was fetched; a task that could lead out of its folder is removed, and told in the lock."""
    drop_links_above_tasks(folder)
    tasks, unreadable = [], dict(broken)
    try:
        names = named_folders(folder)
    except UserError:
        names = {}
    for name, path in names.items():
        try:
            inspect_tree(path)
        except UserError as error:
            shutil.rmtree(path)
            unreadable[name] = error.what
            continue
        try:
            tasks.append(load_task(path, name))
        except UserError as error:
            unreadable[name] = error.what
    if not tasks:
        first = "; ".join(f"{name}: {what}" for name, what in list(unreadable.items())[:1])
        what = f"none of its {len(unreadable)} tasks can be read ({first})" if first else "no tasks in it"
        raise UserError(what, where=str(source), do=f"name a set of folders with a {TASK_FILE}")
    return lock_of(str(source), tasks, unreadable)
