"""Reading a folder of Harbor tasks."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harbortrainer.errors import UserError
from harbortrainer.tasks.content_key import content_key
from harbortrainer.tasks.task_folder import BadTasksError, load_folder, load_task


def make_task(folder: Path, toml: str = 'version = "1.0"\n', instruction: str = "Do it.") -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text(instruction)
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    return folder


def test_load_folder_sorts_tasks(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        make_task(tmp_path / name, instruction=f"Do {name}.\n")
    tasks = load_folder(tmp_path)
    assert [(task.name, task.instruction, task.n_steps) for task in tasks] == [
        ("a", "Do a.", 1),
        ("b", "Do b.", 1),
        ("c", "Do c.", 1),
    ]
    assert all(task.path.is_absolute() for task in tasks)


def test_include_and_exclude_match_names(tmp_path: Path) -> None:
    for name in ("easy-1", "easy-2", "hard-1"):
        make_task(tmp_path / name, instruction=name)
    assert [task.name for task in load_folder(tmp_path, ["easy-*"], ["*-2"])] == ["easy-1"]


def test_refuses_duplicate_task(tmp_path: Path) -> None:
    for name in ("first", "second"):
        make_task(tmp_path / name)
    with pytest.raises(UserError, match="first and second are the same task"):
        load_folder(tmp_path)
    assert [task.name for task in load_folder(tmp_path, exclude=["second"])] == ["first"]


def test_loads_folder_that_is_a_task(tmp_path: Path) -> None:
    assert [task.name for task in load_folder(make_task(tmp_path / "only"))] == ["only"]


def test_multi_step_task_joins_instructions(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "m", '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n')
    for step in ("one", "two"):
        (folder / "steps" / step).mkdir(parents=True)
        (folder / "steps" / step / "instruction.md").write_text(f"Step {step}.")
    task = load_task(folder)
    assert (task.instruction, task.n_steps) == ("Step one.\n\nStep two.", 2)


def test_task_key_depends_on_content_only(tmp_path: Path) -> None:
    first, second = make_task(tmp_path / "x" / "task"), make_task(tmp_path / "y" / "renamed")
    assert content_key(first) == content_key(second)
    (second / "tests" / "test.sh").chmod(0o755)
    executable = content_key(second)
    assert executable != content_key(first)
    (second / "tests" / "test.sh").write_text("something else\n")
    assert content_key(second) != executable
    (first / "tests" / "extra").write_text("")
    assert content_key(first) != executable


@pytest.mark.parametrize(
    ("toml", "where", "what"),
    [
        ("version = ", "task.toml", "not valid TOML"),
        ('\ufeffversion = "1.0"', "task.toml", "begins with a byte order mark"),
        ('agent = "terminus"\n', "task.toml: agent", "must be a table"),
        ("[[steps]]\ninstruction = 1\n", "task.toml: steps", "every step needs a name"),
    ],
)
def test_reports_malformed_task_toml_key(tmp_path: Path, toml: str, where: str, what: str) -> None:
    make_task(tmp_path / "broken", toml)
    with pytest.raises(UserError, match=what) as error:
        load_folder(tmp_path)
    assert str(tmp_path / "broken") in error.value.where
    assert where in error.value.where


def test_reports_non_utf8_file_name(tmp_path: Path) -> None:
    Path(make_task(tmp_path / "odd") / os.fsdecode(b"caf\xe9.txt")).touch()
    with pytest.raises(UserError, match=r"the file name 'caf\\udce9\.txt' is not UTF-8; rename the file") as error:
        load_folder(tmp_path)
    assert error.value.where == str(tmp_path / "odd")


def test_reports_ignore_file_that_harbor_cannot_read(tmp_path: Path) -> None:
    (make_task(tmp_path / "odd") / ".gitignore").write_bytes("jobs/".encode("utf-16"))
    with pytest.raises(UserError, match="not UTF-8 text; save it as UTF-8") as error:
        load_folder(tmp_path)
    assert error.value.where == str(tmp_path / "odd/.gitignore")


def test_quotes_folder_in_migration_command(tmp_path: Path) -> None:
    (tmp_path / "old tasks").mkdir()
    (tmp_path / "old tasks/task.yaml").touch()
    with pytest.raises(UserError, match=rf"`harbor task migrate -i '{tmp_path}/old tasks' -o NEW`"):
        load_folder(tmp_path / "old tasks")


def test_reports_missing_folder_tasks_and_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_folder(tmp_path / "nowhere")
    (tmp_path / "notes").touch()
    with pytest.raises(UserError, match="not a folder"):
        load_folder(tmp_path / "notes")
    with pytest.raises(UserError, match=r"no tasks here; put each task into a sub-folder with a task\.toml"):
        load_folder(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/task.yaml").touch()
    with pytest.raises(
        UserError,
        match=r"Terminal-Bench's format here \(task\.yaml\); convert them with "
        rf"`harbor task migrate -i {tmp_path} -o NEW`",
    ):
        load_folder(tmp_path)
    (tmp_path / "no-toml").mkdir()
    (tmp_path / "no-toml" / "instruction.md").touch()
    with pytest.raises(UserError, match=r"no task\.toml"):
        load_folder(tmp_path)
    (tmp_path / "no-toml" / "instruction.md").unlink()
    (tmp_path / "no-toml" / "task.toml").write_text("")
    with pytest.raises(UserError, match=r"no instruction\.md"):
        load_folder(tmp_path)
    (tmp_path / "no-toml" / "instruction.md").write_text(" \n")
    with pytest.raises(UserError, match="empty"):
        load_folder(tmp_path)
    with pytest.raises(UserError, match="none of the 1 tasks matches"):
        load_folder(tmp_path, ["else*"])


def test_finds_nested_tasks_with_path_names(tmp_path: Path) -> None:
    for name in ("shell/easy/one", "shell/two", "three"):
        make_task(tmp_path / name, instruction=name)
    (tmp_path / "three" / "environment" / "task.toml").parent.mkdir()
    (tmp_path / "three" / "environment" / "task.toml").write_text("not a task of its own")
    assert [task.name for task in load_folder(tmp_path)] == ["shell/easy/one", "shell/two", "three"]
    assert [task.name for task in load_folder(tmp_path, ["shell/*"], ["*/two"])] == ["shell/easy/one"]


def test_ignores_folders_without_tasks(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks" / "one")
    for name in ("slides/pictures", "tools/tests", "tasks/shared"):
        (tmp_path / name).mkdir(parents=True)
    assert [task.name for task in load_folder(tmp_path)] == ["tasks/one"]
    for lost in ("tasks/two/environment", "tasks/two/tests", "tasks/three/steps/first"):
        (tmp_path / lost).mkdir(parents=True)
    for step in ("tasks/three", "tasks/three/steps/first"):
        (tmp_path / step / "instruction.md").write_text("Do it.")
    with pytest.raises(BadTasksError) as error:
        load_folder(tmp_path)
    assert [str(tmp_path / "tasks" / name) for name in ("three", "two")] == [bad.where for bad in error.value.problems]


def test_follows_links_without_cycles(tmp_path: Path) -> None:
    make_task(tmp_path / "set" / "one")
    make_task(tmp_path / "elsewhere" / "two", instruction="two")
    (tmp_path / "set" / "linked").symlink_to("../elsewhere")
    for link, target in (("set/here", "."), ("elsewhere/back", "../set"), ("elsewhere/two/tests/up", "..")):
        (tmp_path / link).symlink_to(target)
    assert [task.name for task in load_folder(tmp_path / "set")] == ["linked/two", "one"]


AS_NOBODY = """
import os, sys
from harbortrainer.errors import UserError
from harbortrainer.tasks.task_folder import load_folder
os.setuid(65534) if os.getuid() == 0 else None
try:
    load_folder(sys.argv[1])
except UserError as error:
    print(error)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """pytest's temporary folders are private to one user."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("locked", ["", "one", "one/task.toml", "one/instruction.md", "one/tests", "one/tests/test.sh"])
def test_reports_unreadable_files(open_folder: Path, locked: str) -> None:
    make_task(open_folder / "one")
    path = open_folder / locked
    mode = path.stat().st_mode
    path.chmod(0)
    done = subprocess.run([sys.executable, "-c", AS_NOBODY, open_folder], capture_output=True, text=True, check=False)
    path.chmod(mode)
    named = path / "task.toml" if locked == "one" else path
    message = f"{named}: cannot be read: Permission denied; make it readable for the user who trains"
    assert done.stdout.splitlines() == [message], done.stderr


def test_reports_all_bad_tasks_together(tmp_path: Path) -> None:
    make_task(tmp_path / "good")
    make_task(tmp_path / "no-toml", "version = ")
    make_task(tmp_path / "silent", instruction="")
    with pytest.raises(BadTasksError) as error:
        load_folder(tmp_path)
    first, second, last = str(error.value).splitlines()
    assert "no-toml/task.toml: not valid TOML" in first
    assert "silent/instruction.md: empty" in second
    assert last.endswith("1 of 3 tasks load; correct the others, exclude them by name, or set skip_bad = true")


def test_advice_to_skip_bad_tasks_needs_good_ones(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_task(tmp_path / name, instruction="")
    with pytest.raises(BadTasksError) as error:
        load_folder(tmp_path)
    assert str(error.value).endswith("0 of 2 tasks load; correct them")


def test_skipped_bad_tasks_are_reported(tmp_path: Path) -> None:
    make_task(tmp_path / "good")
    make_task(tmp_path / "bad", "version = ")
    skipped: list[UserError] = []
    assert [task.name for task in load_folder(tmp_path, skip=skipped.append)] == ["good"]
    assert ["bad/task.toml" in error.where for error in skipped] == [True]
    with pytest.raises(UserError, match="not valid TOML"):
        load_folder(tmp_path, ["bad"], skip=skipped.append)


def test_task_key_hashes_link_targets_and_ignores_pycache(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    before = content_key(task)
    (task / "tests" / "__pycache__").mkdir()
    (task / "tests" / "__pycache__" / "x.pyc").write_text("compiled")
    assert content_key(task) == before
    (task / "link").symlink_to("nowhere")
    linked = content_key(task)
    (task / "link").unlink()
    (task / "link").symlink_to("elsewhere")
    assert len({before, linked, content_key(task)}) == 3


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a1' * 32}\nsize 5000000\n"


@pytest.mark.parametrize("name", ["instruction.md", "tests/test.sh", "environment/data/big.bin", "solution/model.pt"])
def test_refuses_git_lfs_pointer(tmp_path: Path, name: str) -> None:
    file = make_task(tmp_path / "one") / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(POINTER)
    with pytest.raises(UserError, match=rf"one: Git LFS pointers instead of the files: {name}; install git-lfs"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        f"cat <<E\n{POINTER}E\n",
        POINTER.replace("a1", "xy"),
        POINTER + "more",
        POINTER + "\n" * 2000,
        "version https://git-lfs.github.com/spec/v1\n",
    ],
)
def test_loads_file_that_mentions_git_lfs(tmp_path: Path, text: str) -> None:
    (make_task(tmp_path / "one") / "tests" / "notes.txt").write_text(text)
    assert [task.name for task in load_folder(tmp_path)] == ["one"]
