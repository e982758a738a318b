"""Sets of tasks from elsewhere: fetched by real git and Harbor's own clients, once, whole, and as they were."""

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
from harbortrainer.tasks.harbor_download import carry_out
from harbortrainer.tasks.task_folder import BadTasksError, load_folder
from harbortrainer.tasks.task_store import cache_folder, fetch, is_here, load_source
from harbortrainer.tasks.tasks_lock import LOCK_FILE, read_lock


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


@pytest.fixture(autouse=True)
def no_process_of_its_own(request, monkeypatch) -> None:
    """Harbor's clients at work in this process: they take a second to be imported."""
    if "in_its_own_process" not in request.keywords:
        for name, value in harbor_download.QUIET_GIT.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(harbor_download, "ask_child", lambda source, target, _: carry_out(source, target))


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
    """What lies in the cache beside sets and their locks."""
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")] if folder.exists() else []


def test_a_git_repository_gives_its_tasks_at_the_commit(repository, tmp_path, own_cache) -> None:
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


def test_what_was_fetched_is_what_lies_in_the_repository(repository, tmp_path) -> None:
    (repository / "tasks" / "one" / "tests" / "test.sh").chmod(0o755)
    url = bare(repository, tmp_path / "r.git") if commit(repository) else ""
    fetched = {task.name: task.key for task in load_source(task_source(f"{url}@main"))}
    assert fetched == {task.name: task.key for task in load_folder(repository / "tasks")}


def test_a_single_task_and_a_whole_repository_are_sources_too(tmp_path) -> None:
    make_task(tmp_path / "work" / "alone")
    (tmp_path / "work" / "README").write_text("no task")
    at = commit(tmp_path / "work")
    url = bare(tmp_path / "work", tmp_path / "r.git")
    assert names(f"{url}@{at}#alone") == ["alone"]
    assert names(f"{url}@{at}#.") == ["alone"]


def test_a_pinned_source_needs_its_origin_once(repository, tmp_path) -> None:
    at = commit(repository)
    url = bare(repository, tmp_path / "r.git")
    source = task_source(f"{url}@{at}")
    assert not is_here(source)
    told: list[str] = []
    first = load_source(source, tell=told.append)
    shutil.rmtree(tmp_path / "r.git")
    assert is_here(source)
    assert load_source(source, tell=told.append) == first
    assert told == [f"fetching {source} ..."]


def test_the_lock_holds_each_tasks_content_and_a_changed_copy_is_refused(repository, tmp_path) -> None:
    at = commit(repository)
    source = task_source(f"{bare(repository, tmp_path / 'r.git')}@{at}")
    found = fetch(source)
    lock = read_lock(found.folder.parent)
    assert lock is not None and lock.source == str(source)
    assert lock.tasks == {task.name: task.key for task in load_folder(repository / "tasks")}
    (found.folder / "one" / "tests" / "test.sh").write_text("true\n")
    with pytest.raises(UserError, match="the task one is another one than was fetched"):
        load_source(source)


def test_links_of_a_repository_never_bring_files_of_this_machine(repository, tmp_path) -> None:
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


def test_a_folder_that_is_itself_a_link_is_refused(repository, tmp_path) -> None:
    (repository / "etc").symlink_to("/etc")
    at = commit(repository)
    with pytest.raises(UserError, match="'etc' is a link"):
        fetch(task_source(f"{bare(repository, tmp_path / 'r.git')}@{at}#etc"))


def test_a_dataset_of_a_registry_gives_the_tasks_that_it_lists(repository, tmp_path) -> None:
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
def test_a_registry_cannot_make_git_run_or_read_something_else(entry, repository, tmp_path) -> None:
    commit(repository)
    url, mark = bare(repository, tmp_path / "r.git"), tmp_path / "mark"
    spelled = {key: value.replace("URL", url).replace("MARK", str(mark)) for key, value in entry.items()}
    registry = write_registry(tmp_path / "registry.json", [{"name": "x", **spelled}])
    with pytest.raises(UserError, match="cannot be fetched"):
        fetch(task_source(f"{registry}#own-set@1.0"))
    assert not mark.exists()


def test_rows_of_parquet_files_become_tasks(tmp_path) -> None:
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
    with pytest.raises(UserError, match="holds other tasks than it did"):
        fetch(task_source(pinned))


def test_a_broken_row_loses_no_other(tmp_path) -> None:
    good = packed(make_task(tmp_path / "made" / "good"))
    rows = {"good": good, "cut": good[:60], "none": None, "../up": good, ".hidden": good}
    file = write_parquet(tmp_path / "t.parquet", rows)
    with pytest.raises(BadTasksError) as caught:
        load_source(task_source(str(file)))
    said = str(caught.value)
    assert "cut: no archive of a task" in said and "none: task_binary holds no bytes" in said
    assert "row 3 of t.parquet: '../up' is no name of a task" in said and "1 of 5 tasks load" in said
    skipped: list[UserError] = []
    assert names(str(file), skip=skipped.append) == ["good"]
    assert len(skipped) == 4
    assert names(str(file), exclude=["cut", "none", "row *"]) == ["good"]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda file, task: write_parquet(file, {"a": task}, ("path", "content")), "has no column task_binary"),
        (lambda file, task: file.write_bytes(b"no parquet"), "not a parquet file"),
        (lambda file, task: write_parquet(file, {"a": b"x", "b": b"y"}), "none of its 2 tasks can be read"),
        (lambda file, task: write_parquet(file, {}), "no tasks in it"),
        (lambda file, task: write_parquet(file, {"a": task, "a/b": task}), "one lies in the other"),
        (lambda file, task: write_parquet(file, {"a/b": task, "a": task}), "one lies in the other"),
    ],
)
def test_a_parquet_file_that_is_no_set_of_tasks_is_a_line(make, what, tmp_path, own_cache) -> None:
    make(tmp_path / "t.parquet", packed(make_task(tmp_path / "made")))
    with pytest.raises(UserError, match=what) as caught:
        fetch(task_source(str(tmp_path / "t.parquet")))
    assert "\n" not in str(caught.value)
    assert left(own_cache) == [] and not list(own_cache.glob("t*"))


def test_the_same_task_twice_is_told_and_can_be_skipped(tmp_path) -> None:
    task = packed(make_task(tmp_path / "made"))
    file = write_parquet(tmp_path / "t.parquet", {"a": task, "b": task})
    with pytest.raises(UserError, match="a and b are the same task"):
        load_source(task_source(str(file)))
    skipped: list[UserError] = []
    assert names(str(file), skip=skipped.append) == ["a"]
    assert "a and b are the same task" in str(skipped[0])


@pytest.mark.parametrize(
    ("spelled", "what"),
    [
        ("URL@" + "a" * 40, "no commit"),
        ("URL@nowhere", "no commit"),
        ("URL@abc123", "no commit"),
        ("URL#missing", "no folder 'missing' there"),
        ("URL#empty", "no tasks in it"),
        ("file:///nowhere/r.git", "does not appear to be a git repository"),
        ("http://127.0.0.1:9/o/r", "cannot be reached"),
        ("http://127.0.0.1:9/registry.json#set@1", "cannot be reached"),
    ],
)
def test_what_cannot_be_fetched_is_a_line(spelled, what, repository, tmp_path, own_cache) -> None:
    (repository / "empty").mkdir()
    (repository / "empty" / "README").write_text("no task")
    commit(repository)
    with pytest.raises(UserError, match=what) as caught:
        fetch(task_source(spelled.replace("URL", bare(repository, tmp_path / "r.git"))))
    assert caught.value.do and "\n" not in str(caught.value)
    assert left(own_cache) == []


def told_by_another(text: str, cache: str, answers) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    told: list[str] = []
    answers.put((len(told), len(load_source(task_source(text), tell=told.append)), len(told)))


@pytest.mark.in_its_own_process
def test_several_processes_fetch_it_once(repository, tmp_path) -> None:
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
def test_a_killed_fetch_leaves_nothing_that_counts(repository, tmp_path, own_cache) -> None:
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
    assert not is_here(task_source(text)) and len(left(own_cache)) == 1
    assert names(text) == ["hard/two", "one"]
    assert left(own_cache) == []


@pytest.mark.in_its_own_process
def test_fetching_happens_inside_an_event_loop_too(repository, tmp_path) -> None:
    import asyncio

    at = commit(repository)
    text = f"{bare(repository, tmp_path / 'r.git')}@{at}"

    async def inside() -> list[str]:
        return names(text)

    assert asyncio.run(inside()) == ["hard/two", "one"]


def test_a_lock_that_cannot_be_read_says_how_to_go_on(repository, tmp_path) -> None:
    at = commit(repository)
    source = task_source(f"{bare(repository, tmp_path / 'r.git')}@{at}")
    home = fetch(source).folder.parent
    (home / LOCK_FILE).write_text("{")
    with pytest.raises(UserError, match=f"cannot be read; remove {home}"):
        load_source(source)
