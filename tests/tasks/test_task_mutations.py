"""Mutated task folders load or give one line of error, never a traceback.

A sample of the five hundred cases always runs. `--all-mutations`, which `make test-long` sets, runs all.
"""

import random
import re
import shutil
from pathlib import Path

import pytest

from harbortrainer.errors import UserError
from harbortrainer.tasks.task_folder import load_folder

TASKS = Path(__file__).parents[2] / "datasets" / "harbor_tasks"
CASES, SAMPLE = 500, 60
VALUES = (
    "true",
    "-1",
    "inf",
    "nan",
    '""',
    "[]",
    "{}",
    '[""]',
    "[1]",
    "1979-05-27",
    "'x'",
    "[{}]",
    '"../x"',
    '"\\u0000"',
)
BYTES = (
    b"",
    b"\xff\xfe",
    b"\x00",
    b"\xed\xa0\x80",
    b"# only\n",
    b"[steps]\n",
    b"steps = [[]]\n",
    b"a = " + b"[" * 5000,
)


def _replace_bytes(task: Path, rng: random.Random) -> None:
    rng.choice(_files(task)).write_bytes(rng.choice(BYTES))


def _replace_value(task: Path, rng: random.Random) -> None:
    path = task / "task.toml"
    lines = path.read_text().splitlines()
    at = rng.choice([index for index, line in enumerate(lines) if "=" in line])
    lines[at] = f"{lines[at].partition('=')[0]}= {rng.choice(VALUES)}"
    path.write_text("\n".join(lines))


def _replace_table(task: Path, rng: random.Random) -> None:
    name = rng.choice(("task", "metadata", "agent", "verifier", "environment", "solution", "steps", "artifacts"))
    path = task / "task.toml"
    path.write_text(
        f"{name} = {rng.choice(VALUES)}\n" + re.sub(rf"(?m)^\[\[?{name}.*$", "[other]", path.read_text(), count=1)
    )


def _insert_character(task: Path, rng: random.Random) -> None:
    path = task / "task.toml"
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    path.write_bytes(data[:at] + rng.choice((b"\xff", b'"', b"[", b"=", b"\x00", b"\n")) + data[at:])


def _truncate(task: Path, rng: random.Random) -> None:
    path = rng.choice(_files(task))
    path.write_bytes(path.read_bytes()[: rng.randrange(40)])


def _remove(task: Path, rng: random.Random) -> None:
    rng.choice(_files(task)).unlink()


def _replace_by_folder(task: Path, rng: random.Random) -> None:
    path = rng.choice(_files(task))
    path.unlink()
    path.mkdir()


def _replace_by_link(task: Path, rng: random.Random) -> None:
    path = rng.choice(_files(task))
    path.unlink()
    path.symlink_to(rng.choice((path.name, "none", "/dev/null", ".")))


def _add_step(task: Path, rng: random.Random) -> None:
    path = task / "task.toml"
    name = rng.choice(('"../../etc"', '"none"', '""', '"/etc"', '"\\u0000"', "5", '"' + "x" * 5000 + '"'))
    path.write_text(f"{path.read_text()}\n[[steps]]\nname = {name}\n")


def _files(task: Path) -> list[Path]:
    return [task / "task.toml", *sorted(task.rglob("instruction.md"))]


MUTATIONS = (
    _replace_bytes,
    _replace_value,
    _replace_table,
    _insert_character,
    _truncate,
    _remove,
    _replace_by_folder,
    _replace_by_link,
    _add_step,
)


def test_list_reports_broken_task(tmp_path, request):
    samples = sorted(path.parent for path in TASKS.glob("*/task.toml"))
    share = 1 if request.config.getoption("--all-mutations") else CASES // SAMPLE
    loaded, refused = 0, 0
    for number in range(0, CASES, share):
        rng = random.Random(number)
        task = tmp_path / str(number) / "one"
        shutil.copytree(rng.choice(samples), task)
        mutate = rng.choice(MUTATIONS)
        mutate(task, rng)
        try:
            load_folder(task.parent)
            loaded += 1
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and error.do, (number, mutate.__name__, str(error))
            assert str(tmp_path) in error.where, "the file is named"
        except BaseException as error:
            raise AssertionError(f"case {number}, {mutate.__name__}") from error
        shutil.rmtree(task.parent)
    assert loaded and refused


def test_list_reports_non_utf8_instruction(tmp_path):
    shutil.copytree(next(TASKS.glob("*/instruction.md")).parent, tmp_path / "one")
    (tmp_path / "one" / "instruction.md").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"instruction\.md: not UTF-8 text"):
        load_folder(tmp_path)
