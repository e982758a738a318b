"""Downloads tasks from Harbor's registry and from git repositories with Harbor's clients.

Invariants, whatever a repository or registry contains:
- Links are copied as links and never followed.
- A task list with an invalid commit, folder or URL is refused before git sees it.

The caller checks the targets of links and the size of the download.
"""

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harbor.models.task.id import GitTaskId, LocalTaskId, PackageTaskId
from harbor.registry.client.base import BaseRegistryClient
from harbor.registry.client.factory import RegistryClientFactory
from harbor.registry.client.git_repo import GitRepoRegistryClient, ResolvedRepo
from harbor.tasks.client import TaskClient, TaskDownloadResult

from harbortrainer.config.task_source import DEFAULT_GIT_FOLDER, GIT_SCHEMES, REF, TaskSource
from harbortrainer.harbor_compat import DOWNLOADS, prepare

prepare()
DOWNLOADS.check()

type TaskId = GitTaskId | LocalTaskId | PackageTaskId


class SafeTaskClient(TaskClient):
    """Harbor's client, but links are not followed. Harbor 0.21 follows them to any file of this machine."""

    def _copy_task_source_to_target(self, source_path: Path, target_path: Path, **_: object) -> None:
        if not source_path.exists():
            raise ValueError(f"no folder {source_path.name!r} at that commit")
        if source_path.resolve() != source_path:
            raise ValueError(f"{source_path.name!r} is a link")
        shutil.copytree(source_path, target_path, symlinks=True, ignore=shutil.ignore_patterns(".git"))


class RepositoryClient(SafeTaskClient):
    """Downloads a whole repository. Harbor passes the path to git's sparse checkout, in which `.` matches no file."""

    PATH = Path("*")

    def _copy_task_source_to_target(self, source_path: Path, target_path: Path, **_: object) -> None:
        super()._copy_task_source_to_target(source_path.parent, target_path)


async def pin(source: TaskSource) -> str:
    """Return the commit or version that a source refers to now. Raises the errors of `download`."""
    if source.kind == "git":
        return await GitRepoRegistryClient(_repository(source))._get_resolved_sha()
    found = await _registry(source).get_dataset_metadata(f"{source.where}@{source.at}")
    return found.version or source.at


async def download(source: TaskSource, target: Path) -> None:
    """Download a source into a new folder: a folder per task, or a folder of a git repository as it is.

    Temporary files go beside the target and into `TMPDIR`, whose path must not contain links.

    Args:
        source: A source of kind `registry`, or a pinned one of kind `git`.
        target: The folder to create.

    Raises:
        ValueError: The dataset, version, commit or folder does not exist.
        subprocess.CalledProcessError: git failed; its `stderr` holds the reason.
        OSError: The network or the disk failed.
    """
    if source.kind == "git":
        await _download_git(source, target)
        return
    found = await _registry(source).get_dataset_metadata(f"{source.where}@{source.at}")
    for task_id in found.task_ids:
        _refuse_invalid(task_id, local=bool(source.registry) and "://" not in source.registry)
    await _place(found.task_ids, target)


async def _download_git(source: TaskSource, target: Path) -> None:
    part = source.part or DEFAULT_GIT_FOLDER
    whole = part == "."
    client, path = (RepositoryClient(), RepositoryClient.PATH) if whole else (SafeTaskClient(), Path(part))
    task_id = GitTaskId(git_url=source.where, git_commit_id=source.at, path=path)
    (fetched,) = await _fetch([task_id], target, client)
    fetched.path.rename(target)


def _repository(source: TaskSource) -> ResolvedRepo:
    at = source.at or None
    return ResolvedRepo(
        host="", org="", name="", git_url=source.where, ref=at, resolved_sha=at if source.pinned else None
    )


async def _fetch(ids: Sequence[TaskId], target: Path, client: TaskClient) -> list[TaskDownloadResult]:
    """Download tasks beside the target, one folder each, in the order of `ids`."""
    return (await client.download_tasks(list(ids), output_dir=target.with_name("clone"))).results


async def _place(ids: Sequence[TaskId], target: Path) -> None:
    """Download each task into a folder with its name, or with its whole path if another task has that name."""
    if not ids:
        raise ValueError("it contains no tasks")
    fetched = await _fetch(ids, target, SafeTaskClient())
    counts = Counter(task_id.get_name() for task_id in ids)
    for task_id, result in zip(ids, fetched, strict=True):
        name = task_id.get_name()
        if counts[name] > 1 and not isinstance(task_id, PackageTaskId):
            name = task_id.path.as_posix().lstrip("/")
        place = target / name
        if place.exists():
            raise ValueError(f"two of its tasks are named {name}")
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(task_id, LocalTaskId):
            shutil.copytree(result.path, place, symlinks=True)
        else:
            result.path.rename(place)


def _registry(source: TaskSource) -> BaseRegistryClient:
    if "/" in source.where:
        from harbor.registry.client.package import PackageDatasetClient

        return PackageDatasetClient()
    if not source.registry:
        return RegistryClientFactory.create()
    if "://" in source.registry:
        return RegistryClientFactory.create(registry_url=source.registry)
    return RegistryClientFactory.create(registry_path=Path(source.registry))


def _refuse_invalid(task_id: TaskId, *, local: bool) -> None:
    """Refuse an unsafe URL, commit or path. Git would read a commit that begins with a dash as an option."""
    match task_id:
        case GitTaskId(git_url=url, git_commit_id=commit, path=path):
            invalid = not url.startswith((*GIT_SCHEMES, "git@")) or (commit is not None and not REF.fullmatch(commit))
            invalid = invalid or path.is_absolute() or ".." in path.parts
        case LocalTaskId():
            invalid = not local
        case PackageTaskId(org=org, name=name):
            invalid = not all(REF.fullmatch(part) and "/" not in part for part in (org, name))
    if invalid:
        raise ValueError(f"invalid entry in its task list: {task_id}")
