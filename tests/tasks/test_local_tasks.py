"""A request's task is found on this machine by its content, and nothing else is played."""

import shutil
from pathlib import Path

import pytest

from harbortrainer.tasks.local_tasks import LOCAL_TASKS_VARIABLE, LocalTasks, OtherTaskError
from harbortrainer.tasks.task_folder import TaskRef, load_task


@pytest.fixture
def task(tmp_path: Path) -> TaskRef:
    folder = tmp_path / "trainer" / "sort"
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text('version = "1.0"\n')
    (folder / "instruction.md").write_text("Sort it.")
    return load_task(folder)


def test_task_at_its_path_is_found(task: TaskRef) -> None:
    assert LocalTasks({}).find("sort", str(task.path), task.key) == task.path


def test_other_files_are_refused_by_name(task: TaskRef) -> None:
    (task.path / "instruction.md").write_text("Sort it backwards.")
    with pytest.raises(OtherTaskError, match=rf"^task 'sort': has other files in {task.path} on "):
        LocalTasks({}).find("sort", str(task.path), task.key)


def test_missing_task_is_refused_by_name(task: TaskRef) -> None:
    shutil.rmtree(task.path)
    with pytest.raises(OtherTaskError, match=rf"^task 'sort': is missing: there is no folder {task.path} on "):
        LocalTasks({}).find("sort", str(task.path), task.key)


def test_task_at_another_path_is_found_by_its_content(
    task: TaskRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here" / "sort"
    shutil.copytree(task.path, here)
    (task.path / "instruction.md").write_text("another task, at the path of the request")
    LocalTasks({task.key: str(here)}).write(tmp_path / "tasks.json")
    monkeypatch.setenv(LOCAL_TASKS_VARIABLE, str(tmp_path / "tasks.json"))
    assert LocalTasks.of_process().find("sort", str(task.path), task.key) == here


def test_listed_folder_that_changed_is_refused(task: TaskRef, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(task.path, here)
    (here / "instruction.md").write_text("edited after the list was written")
    with pytest.raises(OtherTaskError, match="is missing"):
        LocalTasks({task.key: str(here)}).find("sort", str(tmp_path / "nowhere"), task.key)
