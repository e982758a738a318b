"""Whatever lies in a folder of tasks: it loads, or one line says what is wrong; never a traceback.

A sample of the five hundred cases runs always; all of them with `--all-mutations`, which `make test-long` sets.
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


def _bytes(task: Path, dice: random.Random) -> None:
    dice.choice(_files(task)).write_bytes(dice.choice(BYTES))


def _value(task: Path, dice: random.Random) -> None:
    path = task / "task.toml"
    lines = path.read_text().splitlines()
    at = dice.choice([index for index, line in enumerate(lines) if "=" in line])
    lines[at] = f"{lines[at].partition('=')[0]}= {dice.choice(VALUES)}"
    path.write_text("\n".join(lines))


def _table(task: Path, dice: random.Random) -> None:
    name = dice.choice(("task", "metadata", "agent", "verifier", "environment", "solution", "steps", "artifacts"))
    path = task / "task.toml"
    path.write_text(
        f"{name} = {dice.choice(VALUES)}\n" + re.sub(rf"(?m)^\[\[?{name}.*$", "[other]", path.read_text(), count=1)
    )


def _character(task: Path, dice: random.Random) -> None:
    path = task / "task.toml"
    data = path.read_bytes()
    at = dice.randrange(len(data) + 1)
    path.write_bytes(data[:at] + dice.choice((b"\xff", b'"', b"[", b"=", b"\x00", b"\n")) + data[at:])


def _cut(task: Path, dice: random.Random) -> None:
    path = dice.choice(_files(task))
    path.write_bytes(path.read_bytes()[: dice.randrange(40)])


def _gone(task: Path, dice: random.Random) -> None:
    dice.choice(_files(task)).unlink()


def _a_folder(task: Path, dice: random.Random) -> None:
    path = dice.choice(_files(task))
    path.unlink()
    path.mkdir()


def _a_link(task: Path, dice: random.Random) -> None:
    path = dice.choice(_files(task))
    path.unlink()
    path.symlink_to(dice.choice((path.name, "none", "/dev/null", ".")))


def _a_step(task: Path, dice: random.Random) -> None:
    path = task / "task.toml"
    name = dice.choice(('"../../etc"', '"none"', '""', '"/etc"', '"\\u0000"', "5", '"' + "x" * 5000 + '"'))
    path.write_text(f"{path.read_text()}\n[[steps]]\nname = {name}\n")


def _files(task: Path) -> list[Path]:
    return [task / "task.toml", *sorted(task.rglob("instruction.md"))]


BREAKS = (_bytes, _value, _table, _character, _cut, _gone, _a_folder, _a_link, _a_step)


def test_a_broken_task_is_told_in_one_line(tmp_path, request):
    samples = sorted(path.parent for path in TASKS.glob("*/task.toml"))
    share = 1 if request.config.getoption("--all-mutations") else CASES // SAMPLE
    fine, refused = 0, 0
    for number in range(0, CASES, share):
        dice = random.Random(number)
        task = tmp_path / str(number) / "one"
        shutil.copytree(dice.choice(samples), task)
        change = dice.choice(BREAKS)
        change(task, dice)
        try:
            load_folder(task.parent)
            fine += 1
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and error.do, (number, change.__name__, str(error))
            assert str(tmp_path) in error.where, "the file is named"
        except BaseException as error:
            raise AssertionError(f"case {number}, {change.__name__}") from error
        shutil.rmtree(task.parent)
    assert fine and refused


def test_an_instruction_that_is_not_utf_8_is_told(tmp_path):
    shutil.copytree(next(TASKS.glob("*/instruction.md")).parent, tmp_path / "one")
    (tmp_path / "one" / "instruction.md").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"instruction\.md: not UTF-8 text"):
        load_folder(tmp_path)
