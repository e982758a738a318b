"""Task sets are fetched once, completely and unchanged, with real git and Harbor's clients."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest
from task_sets import bare, commit, git, make_task, packed, write_parquet, write_registry

from harbortrainer.config.task_source import task_source
from harbortrainer.errors import UserError
from harbortrainer.tasks import harbor_download
from harbortrainer.tasks.harbor_download import execute
from harbortrainer.tasks.task_folder import BadTasksError, load_folder
from harbortrainer.tasks.task_store import LOCK_FILE, fetch, is_available, load_source, read_lock, tasks_cache


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tasks_cache()


@pytest.fixture(autouse=True)
def no_process_of_its_own(request, monkeypatch) -> None:
    """Run Harbor's clients in this process, since importing them takes a second."""
    if "in_its_own_process" not in request.keywords:
        for name, value in harbor_download.QUIET_GIT.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(harbor_download, "run_child", lambda source, target, _: execute(source, target))


@pytest.fixture
def repository(tmp_path) -> Path:
    """Two tasks under tasks/, one in a category."""
    folder = tmp_path / "work"
    make_task(folder / "tasks" / "one", "Do one.")
    make_task(folder / "tasks" / "hard" / "two", "Do two.")
    return folder


def names(text: str, **how) -> list[str]:
    return [task.name for task in load_source(task_source(text), **how)]


def left(folder: Path) -> list[str]:
    """Return the files in the cache other than sets and their locks."""
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")] if folder.exists() else []


def test_git_source_loads_tasks_at_commit(repository, tmp_path, own_cache) -> None:
    old = commit(repository)
    make_task(repository / "tasks" / "three", "Do three.")
    new = commit(repository)
    git(repository, "tag", "-a", "v2", "-m", "second")
    url = bare(repository, tmp_path / "r.git")
    assert names(f"{url}@{old}") == ["hard/two", "one"]
    assert names(f"{url}@{new}#tasks/hard") == ["two"]
    assert names(f"{url}@main") == names(f"{url}@v2") == names(url) == ["hard/two", "one", "three"]
    assert fetch(task_source(f"{url}@main")).source.at == fetch(task_source(url)).source.at == new
    assert left(own_cache) == []


def test_fetched_files_equal_repository(repository, tmp_path) -> None:
    (repository / "tasks" / "one" / "tests" / "test.sh").chmod(0o755)
    url = bare(repository, tmp_path / "r.git") if commit(repository) else ""
    fetched = {task.name: task.key for task in load_source(task_source(f"{url}@main"))}
    assert fetched == {task.name: task.key for task in load_folder(repository / "tasks")}


def test_source_may_be_one_task_or_whole_repository(tmp_path) -> None:
    make_task(tmp_path / "work" / "alone")
    (tmp_path / "work" / "README").write_text("no task")
    at = commit(tmp_path / "work")
    url = bare(tmp_path / "work", tmp_path / "r.git")
    assert names(f"{url}@{at}#alone") == ["alone"]
    assert names(f"{url}@{at}#.") == ["alone"]


def test_whole_repository_has_the_tasks_of_its_clone_at_any_depth(repository, tmp_path) -> None:
    make_task(repository / "near", "Do near.")
    make_task(repository / "sets" / "2026" / "easy" / "far", "Do far.")
    make_task(repository / ".hidden" / "draft", "Do no draft.")
    url = bare(repository, tmp_path / "r.git") if commit(repository) else ""
    clone = {task.name: task.key for task in load_folder(repository)}
    assert list(clone) == ["near", "sets/2026/easy/far", "tasks/hard/two", "tasks/one"]
    assert {task.name: task.key for task in load_source(task_source(f"{url}@main#."))} == clone


@pytest.mark.parametrize("name", ["sort-files", ".sort-files"])
def test_repository_that_is_one_task_is_named_after_it(name, tmp_path, own_cache) -> None:
    make_task(tmp_path / "work", "Sort the files.")
    at = commit(tmp_path / "work")
    url = bare(tmp_path / "work", tmp_path / f"{name}.git")
    (task,) = load_source(task_source(f"{url}@{at}#."))
    assert task.name == "sort-files" and not (task.path / ".git").exists()
    with pytest.raises(UserError, match=r"no folder 'tasks' at that commit; .* or URL@COMMIT#. for all"):
        fetch(task_source(f"{url}@{at}"))


def test_lfs_pointers_are_named_and_other_tasks_kept(repository, tmp_path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    (repository / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")
    (repository / "tasks" / "one" / "tests" / "data.bin").write_text(pointer)
    url = bare(repository, tmp_path / "git") if commit(repository) else ""
    skipped: list[UserError] = []
    assert names(f"{url}@main", skip=skipped.append) == ["hard/two"]
    assert [error.what for error in skipped] == ["Git LFS pointers instead of the files: tests/data.bin"]


def test_pinned_source_is_fetched_once(repository, tmp_path) -> None:
    at = commit(repository)
    url = bare(repository, tmp_path / "r.git")
    source = task_source(f"{url}@{at}")
    assert not is_available(source)
    progress: list[str] = []
    first = load_source(source, report_progress=progress.append)
    shutil.rmtree(tmp_path / "r.git")
    assert is_available(source)
    assert load_source(source, report_progress=progress.append) == first
    assert progress == [f"fetching {source} ..."]


def test_refuses_changed_cached_task(repository, tmp_path) -> None:
    at = commit(repository)
    source = task_source(f"{bare(repository, tmp_path / 'r.git')}@{at}")
    found = fetch(source)
    lock = read_lock(found.folder.parent)
    assert lock is not None and lock.source == str(source)
    assert lock.tasks == {task.name: task.key for task in load_folder(repository / "tasks")}
    (found.folder / "one" / "tests" / "test.sh").write_text("true\n")
    with pytest.raises(UserError, match="the task one differs from what was fetched"):
        load_source(source)


def test_repository_links_cannot_read_local_files(repository, tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("do not read")
    (repository / "tasks" / "one" / "solution").symlink_to(secret)
    (repository / "tasks" / "whole-disk").symlink_to("/")
    at = commit(repository)
    found = fetch(task_source(f"{bare(repository, tmp_path / 'r.git')}@{at}"))
    assert found.lock is not None and list(found.lock.tasks) == ["hard/two"]
    assert found.lock.unreadable == {"one": "the link solution leads out of the task"}
    assert not any(path.is_symlink() or "do not read" in path.read_text() for path in found.folder.rglob("*.*"))
    with pytest.raises(UserError, match="one: the link solution leads out of the task"):
        load_source(found.source)
    skipped: list[UserError] = []
    assert [task.name for task in load_source(found.source, skip=skipped.append)] == ["hard/two"]
    assert [error.where for error in skipped] == ["one"]


def test_refuses_linked_source_folder(repository, tmp_path) -> None:
    (repository / "etc").symlink_to("/etc")
    at = commit(repository)
    with pytest.raises(UserError, match="'etc' is a link"):
        fetch(task_source(f"{bare(repository, tmp_path / 'r.git')}@{at}#etc"))


def test_registry_dataset_loads_its_tasks(repository, tmp_path) -> None:
    at = commit(repository)
    url = bare(repository, tmp_path / "r.git")
    make_task(tmp_path / "here" / "local")
    registry = write_registry(
        tmp_path / "registry.json",
        [
            {"name": "one", "git_url": url, "git_commit_id": at, "path": "tasks/one"},
            {"name": "two", "git_url": url, "git_commit_id": at, "path": "tasks/hard/two"},
            {"name": "local", "path": str(tmp_path / "here" / "local")},
        ],
    )
    assert names(f"{registry}#own-set@1.0") == ["local", "one", "two"]
    wrong = {"own-set@9": "Version 9 of dataset own-set not found", "none@1": "Dataset none not found"}
    for text, what in wrong.items():
        with pytest.raises(UserError, match=what) as caught:
            fetch(task_source(f"{registry}#{text}"))
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="No such file"):
        fetch(task_source(f"{tmp_path}/none.json#own-set@1.0"))


@pytest.mark.parametrize(
    "entry",
    [
        {"git_url": "URL", "git_commit_id": "--upload-pack=touch MARK", "path": "tasks/one"},
        {"git_url": "--upload-pack=touch MARK", "git_commit_id": "a" * 40, "path": "tasks/one"},
        {"git_url": "ext::sh -c touch% MARK", "git_commit_id": "a" * 40, "path": "tasks/one"},
        {"git_url": "URL", "git_commit_id": "main", "path": "../../../../etc"},
        {"git_url": "URL", "git_commit_id": "main", "path": "/etc"},
    ],
)
def test_registry_entry_cannot_inject_git_arguments(entry, repository, tmp_path) -> None:
    commit(repository)
    url, mark = bare(repository, tmp_path / "r.git"), tmp_path / "mark"
    formatted = {key: value.replace("URL", url).replace("MARK", str(mark)) for key, value in entry.items()}
    registry = write_registry(tmp_path / "registry.json", [{"name": "x", **formatted}])
    with pytest.raises(UserError, match="cannot be fetched"):
        fetch(task_source(f"{registry}#own-set@1.0"))
    assert not mark.exists()


def test_parquet_rows_become_tasks(tmp_path) -> None:
    for name in ("a", "deep/b", "c"):
        make_task(tmp_path / "made" / name, f"Do {name}.")
    modes: dict[str, Literal["w:gz", "w"]] = {"a": "w:gz", "deep/b": "w:gz", "c": "w"}
    rows = {name: packed(tmp_path / "made" / name, mode) for name, mode in modes.items()}
    whole = write_parquet(tmp_path / "sets" / "tasks.parquet", rows)
    write_parquet(tmp_path / "two" / "data" / "train-0.parquet", {"a": rows["a"]})
    write_parquet(tmp_path / "two" / "data" / "train-1.parquet", {"c": rows["c"]})
    tasks = load_source(task_source(str(whole)))
    assert [task.name for task in tasks] == ["a", "c", "deep/b"]
    assert {task.name: task.key for task in tasks} == {t.name: t.key for t in load_folder(tmp_path / "made")}
    assert names(str(tmp_path / "two")) == names(f"{tmp_path}/two/data/*.parquet") == ["a", "c"]
    pinned = str(fetch(task_source(str(whole))).source)
    assert names(pinned) == ["a", "c", "deep/b"]
    write_parquet(whole, {"a": rows["a"]})
    assert names(str(whole)) == ["a"]
    with pytest.raises(UserError, match="content has changed"):
        fetch(task_source(pinned))


def test_broken_parquet_row_does_not_affect_others(tmp_path) -> None:
    good = packed(make_task(tmp_path / "made" / "good"))
    rows = {"good": good, "cut": good[:60], "none": None, "../up": good, ".hidden": good}
    file = write_parquet(tmp_path / "t.parquet", rows)
    with pytest.raises(BadTasksError) as caught:
        load_source(task_source(str(file)))
    message = str(caught.value)
    assert "cut: not a valid task archive" in message and "none: task_binary is not bytes" in message
    assert "row 3 of t.parquet: '../up' is not a valid task name" in message and "1 of 5 tasks load" in message
    skipped: list[UserError] = []
    assert names(str(file), skip=skipped.append) == ["good"]
    assert len(skipped) == 4
    assert names(str(file), exclude=["cut", "none", "row *"]) == ["good"]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda file, task: write_parquet(file, {"a": task}, ("path", "content")), "has no column task_binary"),
        (lambda file, task: file.write_bytes(b"no parquet"), "not a parquet file"),
        (lambda file, task: write_parquet(file, {"a": b"x", "b": b"y"}), "0 of 2 tasks load"),
        (lambda file, task: write_parquet(file, {}), "has no tasks"),
        (lambda file, task: write_parquet(file, {"a": task, "a/b": task}), "one is inside the other"),
        (lambda file, task: write_parquet(file, {"a/b": task, "a": task}), "one is inside the other"),
    ],
)
def test_reports_invalid_parquet_file(make, what, tmp_path, own_cache) -> None:
    make(tmp_path / "t.parquet", packed(make_task(tmp_path / "made")))
    with pytest.raises(UserError, match=what) as caught:
        fetch(task_source(str(tmp_path / "t.parquet")))
    assert isinstance(caught.value, BadTasksError) or "\n" not in str(caught.value)
    assert left(own_cache) == [] and not list(own_cache.glob("t*"))


def test_duplicate_task_is_reported_and_can_be_skipped(tmp_path) -> None:
    task = packed(make_task(tmp_path / "made"))
    file = write_parquet(tmp_path / "t.parquet", {"a": task, "b": task})
    with pytest.raises(UserError, match="a and b are the same task"):
        load_source(task_source(str(file)))
    skipped: list[UserError] = []
    assert names(str(file), skip=skipped.append) == ["a"]
    assert "a and b are the same task" in str(skipped[0])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("URL@" + "a" * 40, "no commit"),
        ("URL@nowhere", "no commit"),
        ("URL@abc123", "no commit"),
        ("URL#missing", "no folder 'missing' at that commit"),
        ("URL#empty", "has no tasks"),
        ("file:///nowhere/r.git", "does not appear to be a git repository"),
        ("http://127.0.0.1:9/o/r", "cannot be reached"),
        ("http://127.0.0.1:9/registry.json#set@1", "cannot be reached"),
    ],
)
def test_reports_failed_download(source, expected, repository, tmp_path, own_cache) -> None:
    (repository / "empty").mkdir()
    (repository / "empty" / "README").write_text("no task")
    commit(repository)
    with pytest.raises(UserError, match=expected) as caught:
        fetch(task_source(source.replace("URL", bare(repository, tmp_path / "r.git"))))
    assert caught.value.do and "\n" not in str(caught.value)
    assert left(own_cache) == []


def test_source_of_old_tasks_gets_the_command_that_converts_them(repository, tmp_path) -> None:
    (repository / "old/first").mkdir(parents=True)
    (repository / "old/first/task.yaml").write_text("instruction: hello")
    commit(repository)
    with pytest.raises(UserError, match=r"only tasks in Terminal-Bench's format .*`harbor task migrate") as caught:
        fetch(task_source(f"{bare(repository, tmp_path / 'r.git')}#old"))
    assert "no such" not in str(caught.value) and caught.value.where.endswith("#old")


def test_each_bad_task_of_a_source_is_named(repository, tmp_path) -> None:
    for name in ("a", "b", "c"):
        make_task(repository / "bad" / name)
        (repository / "bad" / name / "instruction.md").write_text("")
    commit(repository)
    with pytest.raises(BadTasksError) as caught:
        fetch(task_source(f"{bare(repository, tmp_path / 'r.git')}#bad"))
    *lines, last = str(caught.value).splitlines()
    assert [line.split("; ")[0] for line in lines] == ["a: empty", "b: empty", "c: empty"]
    assert "0 of 3 tasks load" in last


def told_by_another(text: str, cache: str, answers) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    progress: list[str] = []
    answers.put((len(progress), len(load_source(task_source(text), report_progress=progress.append)), len(progress)))


@pytest.mark.in_its_own_process
def test_concurrent_processes_fetch_once(repository, tmp_path) -> None:
    at = commit(repository)
    text = f"{bare(repository, tmp_path / 'r.git')}@{at}"
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    others = [context.Process(target=told_by_another, args=(text, str(tmp_path / "cache"), answers)) for _ in range(2)]
    for other in others:
        other.start()
    got = [answers.get() for _ in others]
    for other in others:
        other.join()
    assert [tasks for _, tasks, _ in got] == [2, 2]
    assert sum(fetches for *_, fetches in got) == 1


FETCH = "import sys; from harbortrainer.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.in_its_own_process
def test_killed_fetch_leaves_no_cached_set(repository, tmp_path, own_cache) -> None:
    at = commit(repository)
    text = f"{bare(repository, tmp_path / 'r.git')}@{at}"
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nexec sleep 60\n")
    slow.chmod(0o755)
    path = f"{slow.parent}:{os.environ['PATH']}"
    child = subprocess.Popen([sys.executable, "-c", FETCH, "tasks", "fetch", text], env={**os.environ, "PATH": path})
    while not (tmp_path / "begun").exists():
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not is_available(task_source(text)) and len(left(own_cache)) == 1
    assert names(text) == ["hard/two", "one"]
    assert left(own_cache) == []


@pytest.mark.in_its_own_process
def test_fetch_works_inside_event_loop(repository, tmp_path) -> None:
    import asyncio

    at = commit(repository)
    text = f"{bare(repository, tmp_path / 'r.git')}@{at}"

    async def inside() -> list[str]:
        return names(text)

    assert asyncio.run(inside()) == ["hard/two", "one"]


def test_reports_unreadable_lock_file(repository, tmp_path) -> None:
    at = commit(repository)
    source = task_source(f"{bare(repository, tmp_path / 'r.git')}@{at}")
    home = fetch(source).folder.parent
    (home / LOCK_FILE).write_text("{")
    with pytest.raises(UserError, match=f"cannot be read; remove {home}"):
        load_source(source)
