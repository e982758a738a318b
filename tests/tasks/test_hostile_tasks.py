"""One bad task ends one task: 500 hostile folders and 200 hostile archives, each beside an honest task.

Each command reads all tasks of a set. No command prints a traceback or hangs, nothing is written outside of the set,
and the honest task passes its real trials. A sample always runs; all cases are marked `long`.
"""

import json
import os
import signal
import subprocess
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile_tasks import honest, honest_archive, hostile_archive, hostile_folder
from task_sets import write_parquet

from harbortrainer.cli import main
from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.doctor.task_checks import inspect_tasks
from harbortrainer.errors import UserError
from harbortrainer.tasks.parquet_tasks import unpack_rows
from harbortrainer.tasks.task_archive import unpack_task
from harbortrainer.tasks.task_selection import select_tasks
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.trial_spec import TrialSpec

pytestmark = pytest.mark.process

FOLDERS, ARCHIVES, AT_ONCE = 500, 200, 32
LIMIT_S = 240
"""Longest time of one command over a set."""


@contextmanager
def limited() -> Generator[None]:
    """Fail instead of hanging."""

    def late(*_: object) -> None:
        raise AssertionError(f"still running after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def place(tmp_path: Path) -> Generator[Path]:
    """A folder that is removed at once: pytest cannot remove thousands of nested folders."""
    folder, here = tmp_path / "place", Path.cwd()
    folder.mkdir()
    yield folder
    os.chdir(here)
    subprocess.run(["rm", "-rf", folder], check=True)


def listing(folder: Path) -> set[bytes]:
    """Return all paths below a folder."""
    return {at + b"/" + name for at, *names in os.walk(os.fsencode(folder)) for part in names for name in part}


def command(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Run a command and return its exit code and output."""
    with limited():
        code = main([str(argument) for argument in arguments])
    printed = capfd.readouterr()
    output = printed.out + printed.err
    assert code in (0, 1, 2) and "Traceback" not in output, (arguments, output[-3000:])
    return code, printed.out


def play(folder: Path, seeds: Iterable[int], capfd: pytest.CaptureFixture[str]) -> None:
    """Read a set of hostile tasks and an honest one with each command."""
    tasks, work, report = folder / "home" / "tasks", folder / "work", folder / "report.json"
    attacks = {seed: hostile_folder(tasks, seed) for seed in seeds}
    honest(tasks / "honest")
    work.mkdir()
    before = listing(folder / "home")
    os.chdir(work)
    _, listed = command(capfd, "tasks", "list", tasks, "--json")
    names = {row["name"] for row in json.loads(listed)["tasks"]}
    assert "honest" in names, attacks
    options = ("--repeats", 1, "--cheats", "none", "--environment-kwarg", "image=host", "--parallel", 4)
    _, printed = command(capfd, "tasks", "check", tasks, *options, "--json", report)
    verdicts = {task["task"]: task["problem"] for task in json.loads(report.read_text())["tasks"]}
    assert verdicts["honest"] == "", printed
    command(capfd, "tasks", "list", tasks)
    command(capfd, "tasks", "split", tasks)
    command(capfd, "tasks", "overlap", tasks, tasks)
    command(capfd, "tasks", "fetch", tasks, "--to", folder / "copy")
    with limited():
        selected = select_tasks(TasksetKeys(tasks_dir=tasks, skip_bad=True)).tasks
        assert "honest" in {task.name for task in selected}
        for kind in ("local", "docker", "auto"):
            placed = [name for names in inspect_tasks(selected, kind, {}, {}).placements.values() for name in names]
            assert "honest" in placed
    assert listing(folder / "home") == before
    assert {path.name for path in folder.iterdir()} <= {"home", "work", "report.json", "copy"}


def unpack(folder: Path, seeds: Iterable[int], capfd: pytest.CaptureFixture[str]) -> None:
    """Unpack hostile archives alone, and as rows of a parquet file beside an honest row."""
    archives = {f"row{seed}": hostile_archive(seed) for seed in seeds}
    for name, archive in archives.items():
        target = folder / "alone" / name / "task"
        target.mkdir(parents=True)
        with limited():
            try:
                unpack_task(archive, target)
            except UserError as error:
                assert "\n" not in str(error), (name, str(error))
        assert {path.name for path in target.parent.iterdir()} <= {"task"}, name
    assert {path.name for path in folder.iterdir()} == {"alone"}
    rows = archives | {"honest": honest_archive(folder / "honest")}
    file = write_parquet(folder / "rows" / "t.parquet", rows)
    _, printed = command(capfd, "tasks", "list", file, "--json")
    assert "honest" in {row["name"] for row in json.loads(printed)["tasks"]}, printed[-2000:]
    assert {path.name for path in folder.iterdir()} == {"alone", "honest", "rows", "cache"}
    assert [path.name for path in (folder / "cache" / "harbortrainer").iterdir()] == ["tasks"]


def test_sample_of_hostile_folders_ends_one_task_each(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    play(place, range(AT_ONCE), capfd)


@pytest.mark.long
def test_hostile_folders_end_one_task_each(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for first in range(0, FOLDERS, AT_ONCE):
        folder = place / str(first)
        folder.mkdir()
        play(folder, range(first, min(first + AT_ONCE, FOLDERS)), capfd)


@pytest.mark.parametrize("first", [0, pytest.param(33, marks=pytest.mark.long)])
def test_hostile_archives_end_one_task_each(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """The first 33 archives are the sample."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    unpack(place, range(first, ARCHIVES if first else 33), capfd)


async def test_looping_link_is_the_tasks_error_in_a_real_trial(tmp_path: Path) -> None:
    """Harbor reads the task again for its checksum, inside the trial."""
    task = honest(tmp_path / "task")
    (task / "solution" / "one").symlink_to("two")
    (task / "solution" / "two").symlink_to("one")
    spec = TrialSpec(
        task_dir=task,
        trials_dir=tmp_path / "trials",
        environment_type="local",
        environment_kwargs={"image": "host"},
        agent="nop",
    )
    with pytest.raises(UserError, match=r"task: .*; check the task's files"):
        await run_trial(spec)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("path that is not UTF-8", [b"good", b"\xff\xfe"]),
        ("long path", [b"good", b"a/" * 5000]),
        ("half of a pair", [b"good", b"\xed\xa0\x80"]),
    ],
)
def test_bad_parquet_row_keeps_the_others(tmp_path: Path, name: str, column: list[bytes]) -> None:
    archive = honest_archive(tmp_path / "task")
    names = pa.Array.from_buffers(pa.string(), 2, pa.array(column, pa.binary()).buffers())
    pq.write_table(
        pa.table([names, pa.array([archive, archive])], names=["path", "task_binary"]), tmp_path / "t.parquet"
    )
    broken = unpack_rows([tmp_path / "t.parquet"], tmp_path / "out")
    assert list(broken) == ["row 1 of t.parquet"] and "is not a valid task name" in broken["row 1 of t.parquet"], name
    assert (tmp_path / "out" / "good" / "task.toml").is_file()


def test_damaged_parquet_page_is_one_line(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "t.parquet", {"good": honest_archive(tmp_path / "task")})
    data = bytearray(file.read_bytes())
    for at in range(4, len(data) - 1000, 7):
        data[at] ^= 0xFF
    file.write_bytes(data)
    try:
        unpack_rows([file], tmp_path / "out")
    except UserError as error:
        assert "\n" not in str(error)
