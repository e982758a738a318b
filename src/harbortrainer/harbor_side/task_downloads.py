"""Tasks from Harbor's registry and from git repositories, fetched by Harbor's own clients.

Invariant: what others wrote (a repository, a registry's list) names no place outside of what it is: links are copied as
links, never followed, and a list whose entries are no plain commit, folder or URL is refused before git sees it.
What links may lead to, and how much may come, is for the caller to look at.
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

from harbortrainer.config.task_source import GIT_SCHEMES, HARBORS_FOLDER, REF, TaskSource
from harbortrainer.harbor_side import DOWNLOADS

DOWNLOADS.check()

type TaskId = GitTaskId | LocalTaskId | PackageTaskId


class CarefulTaskClient(TaskClient):
    """Harbor's client, which in 0.21 follows a repository's links to any file of this machine's."""

    def _copy_task_source_to_target(self, source_path: Path, target_path: Path, **_: object) -> None:
        if not source_path.exists():
            raise ValueError(f"no folder {source_path.name!r} there at that commit")
        if source_path.resolve() != source_path:
            raise ValueError(f"{source_path.name!r} is a link")
        shutil.copytree(source_path, target_path, symlinks=True, ignore=shutil.ignore_patterns(".git"))


async def pin(source: TaskSource) -> str:
    """The commit or version that a source means now. Raises as `download`."""
    if source.kind == "git":
        return await GitRepoRegistryClient(_repository(source))._get_resolved_sha()
    found = await _registry(source).get_dataset_metadata(f"{source.where}@{source.at}")
    return found.version or source.at


async def download(source: TaskSource, target: Path) -> None:
    """Fetch a source of kind `git`, which must be pinned, or `registry`, into a folder that is made: a folder a task.

    Temporary files go where `TMPDIR` says, which must be a path without links, and beside the target.

    Raises:
        ValueError: There is no such dataset, version, commit or folder; in Harbor's words or ours.
        subprocess.CalledProcessError: git failed; its `stderr` says why.
        OSError: No network, no disk.
    """
    if source.kind == "git":
        await _download_git(source, target)
        return
    found = await _registry(source).get_dataset_metadata(f"{source.where}@{source.at}")
    for task_id in found.task_ids:
        _refuse_odd(task_id, local=bool(source.registry) and "://" not in source.registry)
    await _place(found.task_ids, target)


async def _download_git(source: TaskSource, target: Path) -> None:
    part = source.part or HARBORS_FOLDER
    if part == ".":
        listed = await GitRepoRegistryClient(_repository(source), path=Path()).get_dataset_metadata("")
        await _place(listed.task_ids, target)
        return
    (got,) = await _fetch([GitTaskId(git_url=source.where, git_commit_id=source.at, path=Path(part))], target)
    got.path.rename(target)


def _repository(source: TaskSource) -> ResolvedRepo:
    at = source.at or None
    return ResolvedRepo(
        host="", org="", name="", git_url=source.where, ref=at, resolved_sha=at if source.pinned else None
    )


async def _fetch(ids: Sequence[TaskId], target: Path) -> list[TaskDownloadResult]:
    """Harbor's own download, beside the target: a folder each, in the order of `ids`."""
    return (await CarefulTaskClient().download_tasks(list(ids), output_dir=target.with_name("clone"))).results


async def _place(ids: Sequence[TaskId], target: Path) -> None:
    """Fetch each task into a folder of its name; where two share one, of its whole path."""
    if not ids:
        raise ValueError("no tasks in it")
    got = await _fetch(ids, target)
    often = Counter(task_id.get_name() for task_id in ids)
    for task_id, result in zip(ids, got, strict=True):
        name = task_id.get_name()
        if often[name] > 1 and not isinstance(task_id, PackageTaskId):
            name = task_id.path.as_posix().lstrip("/")
        place = target / name
        if place.exists():
            raise ValueError(f"two of its tasks are called {name}")
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


def _refuse_odd(task_id: TaskId, *, local: bool) -> None:
    """Git would read a commit that begins with a dash as an option, and run what that names."""
    match task_id:
        case GitTaskId(git_url=url, git_commit_id=commit, path=path):
            odd = not url.startswith((*GIT_SCHEMES, "git@")) or (commit is not None and not REF.fullmatch(commit))
            odd = odd or path.is_absolute() or ".." in path.parts
        case LocalTaskId():
            odd = not local
        case PackageTaskId(org=org, name=name):
            odd = not all(REF.fullmatch(part) and "/" not in part for part in (org, name))
    if odd:
        raise ValueError(f"an entry of it is no task: {task_id}")
