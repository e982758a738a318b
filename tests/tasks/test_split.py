"""A split is stable when tasks are added, and holds out no copy of a training task."""

import random
import re
import shutil
from pathlib import Path

import pytest

from harbortrainer.cli import main
from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.errors import UserError
from harbortrainer.tasks.near_duplicates import copy_groups, overlap
from harbortrainer.tasks.split import SPLIT_FILE, SavedSplit, assign_sides, select_side
from harbortrainer.tasks.task_folder import load_folder

DATASETS = Path(__file__).parents[2] / "datasets"
VOCABULARY = [f"word{number}" for number in range(400)]


def some_words(seed: int, count: int = 60) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=count))


def write_task(
    folder: Path, name: str, *, instruction: str, test: str, dockerfile: str = "FROM debian:12-slim\n"
) -> None:
    task = folder / name
    for part in ("environment", "tests"):
        (task / part).mkdir(parents=True)
    (task / "task.toml").write_text('version = "1.0"\n')
    (task / "instruction.md").write_text(instruction)
    (task / "tests/test.sh").write_text(test)
    (task / "environment/Dockerfile").write_text(dockerfile)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Ten different tasks in `tasks`, and possible copies of `task-0` in `others`."""
    for number in range(10):
        write_task(tmp_path / "tasks", f"task-{number}", instruction=some_words(number), test=some_words(100 + number))
    instruction, test, others = some_words(0), some_words(100), tmp_path / "others"
    write_task(
        others, "same-words", instruction=f"# {instruction.upper()}!", test=test, dockerfile="FROM python:3.12\n"
    )
    write_task(
        others,
        "one-word-changed",
        instruction=instruction.replace(f" {instruction.split()[30]} ", " other ", 1),
        test=test + " more",
    )
    write_task(others, "new-instruction", instruction=some_words(7777), test=test)
    write_task(others, "same-instruction-other-tests", instruction=instruction, test=some_words(8888))
    write_task(
        others, "same-tests-other-instruction", instruction=some_words(9999), test=test, dockerfile="FROM alpine\n"
    )
    return tmp_path


def test_overlap_finds_exactly_the_copies(folders: Path) -> None:
    found = overlap(load_folder(folders / "tasks"), load_folder(folders / "others"), 0.8)
    assert {(copies.task.name, copies.of.name) for copies in found} == {
        ("same-words", "task-0"),
        ("one-word-changed", "task-0"),
        ("new-instruction", "task-0"),
    }
    reasons = {copies.task.name: copies.reason for copies in found}
    assert reasons["new-instruction"] == "the same tests and environment"
    assert reasons["same-words"] == "100% similar" and re.fullmatch(r"9\d% similar", reasons["one-word-changed"])
    equal = overlap(load_folder(folders / "tasks"), load_folder(folders / "others"), 1.0)
    assert {copies.task.name for copies in equal} == {"same-words", "new-instruction"}
    assert {copies.reason for copies in overlap(*[load_folder(folders / "tasks")] * 2, 0.8)} == {"the same content"}


def test_different_environments_are_different_grading(tmp_path: Path) -> None:
    for number in range(2):
        write_task(tmp_path, f"task-{number}", instruction=some_words(number), test="test $(cat /app/a) = $RIGHT")
        (tmp_path / f"task-{number}/task.toml").write_text(f'[verifier.env]\nRIGHT = "{number}"\n')
    assert len(copy_groups(load_folder(tmp_path), 0.8)) == 2


def test_shipped_tasks_have_no_near_copies() -> None:
    train, heldout = (load_folder(DATASETS / "quickstart" / side) for side in ("train", "heldout"))
    samples = load_folder(DATASETS / "harbor_tasks")
    assert len(train) == 8 and len(heldout) == 32 and len(samples) == 13
    assert overlap([*train, *samples], heldout, 0.8) == []
    assert all(len(group) == 1 for group in copy_groups([*train, *heldout, *samples], 0.8))


def test_group_of_near_copies_is_on_one_side(tmp_path: Path) -> None:
    for family in range(40):
        for member in range(1 + family % 4):
            instruction, test = some_words(family, 100), some_words(1000 + family, 100)
            write_task(tmp_path, f"{member}-{family}", instruction=f"{instruction} {member}", test=f"{test} {member}")
    tasks = load_folder(tmp_path)
    sides = assign_sides(tasks, SavedSplit(eval_share=0.3, near_copy=0.8))
    sides_by_family: dict[str, set[str]] = {}
    for name, side in sides.items():
        sides_by_family.setdefault(name.split("-")[1], set()).add(side)
    assert all(len(found) == 1 for found in sides_by_family.values())
    assert 5 <= sum(found == {"eval"} for found in sides_by_family.values()) <= 20
    train, held_out = ([task for task in tasks if sides[task.name] == side] for side in ("train", "eval"))
    assert overlap(train, held_out, 0.8) == []


def test_side_is_independent_of_name_and_other_tasks(folders: Path) -> None:
    settings = SavedSplit(eval_share=0.4, near_copy=0.8)
    before = assign_sides(load_folder(folders / "tasks"), settings)
    assert set(before.values()) == {"train", "eval"}
    (folders / "tasks/task-3").rename(folders / "tasks/renamed")
    for number in range(20, 60):
        write_task(folders / "tasks", f"new-{number}", instruction=some_words(number), test=some_words(100 + number))
    after = assign_sides(load_folder(folders / "tasks"), settings)
    assert after["renamed"] == before.pop("task-3")
    assert {name: after[name] for name in before} == before


def test_saved_split_is_stable_and_excludes_ambiguous_tasks(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folders / "tasks"
    assert main(["tasks", "split", str(folder), "--eval-share", "0.4", "--write"]) == 0
    before = {line for line in capsys.readouterr().out.splitlines() if line.startswith("eval")}
    held_out = {line.split()[1] for line in before}
    assert held_out and (folder / SPLIT_FILE).is_file()
    one, other = next(iter(sorted(held_out))), next(f"task-{n}" for n in range(10) if f"task-{n}" not in held_out)
    for name in (one, other):
        text = (folder / name / "instruction.md").read_text()
        write_task(
            folder, f"copy-of-{name}", instruction=text, test=(folder / name / "tests/test.sh").read_text() + " x"
        )
    (folder / "task-5/instruction.md").write_text(some_words(4242))
    write_task(folder, "ties", instruction=some_words(5555), test=some_words(6666))
    table = TasksetKeys(tasks_dir=folder, split="eval")
    selected = {task.name for task in select_side(load_folder(folder), table)}
    assert selected & {f"task-{n}" for n in range(10)} == held_out
    assert f"copy-of-{one}" in selected and f"copy-of-{other}" not in selected

    tests = [(folder / name / "tests/test.sh").read_text() for name in (one, other)]
    instructions = [(folder / name / "instruction.md").read_text() for name in (one, other)]
    (folder / "ties/instruction.md").write_text(" ".join(instructions))
    (folder / "ties/tests/test.sh").write_text(" ".join(tests))
    kept = SavedSplit.model_validate_json((folder / SPLIT_FILE).read_bytes()).model_copy(update={"near_copy": 0.3})
    assert assign_sides(load_folder(folder), kept)["ties"] == "neither"


def test_reports_empty_side_and_broken_split(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = TasksetKeys(tasks_dir=folders / "tasks", split="eval", eval_share=0.0001)
    with pytest.raises(UserError, match="none of the 10 tasks is on the 'eval' side"):
        select_side(load_folder(folders / "tasks"), table)
    (folders / "tasks" / SPLIT_FILE).write_text("{")
    assert main(["tasks", "split", str(folders / "tasks")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and SPLIT_FILE in error and "--write" in error


def test_split_and_overlap_commands_name_near_copies(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "overlap", str(folders / "tasks"), str(folders / "others")]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"one-word-changed = task-0 \(9\d% similar", printed) and "3 of 5 tasks of" in printed
    assert main(["tasks", "overlap", str(DATASETS / "harbor_tasks"), str(DATASETS / "quickstart/heldout")]) == 0
    assert main(["tasks", "split", str(folders / "others")]) == 0
    printed = capsys.readouterr().out
    assert "near copies: one-word-changed" in printed and "same-instruction-other-tests (" not in printed


def test_split_and_overlap_name_unreadable_tasks_and_go_on(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unreadable task, and two pairs of duplicates."""
    tasks = folders / "tasks"
    (tasks / "task-0" / "task.toml").write_text("agent = ")
    for number in (1, 2):
        shutil.copytree(tasks / f"task-{number}", tasks / f"twin-{number}")
    total = len(load_folder(tasks, skip=lambda error: None))
    assert main(["tasks", "split", str(tasks), "--write"]) == 1
    *_, counts, saved, first, second, third = capsys.readouterr().out.splitlines()
    assert sum(int(part.split()[0]) for part in counts.split(", ")) == total and saved.startswith("saved to ")
    assert first.startswith("BAD ") and "task-0/task.toml: not valid TOML" in first
    assert "task-1 and twin-1 are the same task" in second and "task-2 and twin-2 are the same task" in third
    assert main(["tasks", "overlap", str(folders / "others"), str(tasks)]) == 1
    assert "task-0/task.toml: not valid TOML" in capsys.readouterr().out
