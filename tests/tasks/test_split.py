"""A split holds out the same tasks whatever is added, and never a copy of what is trained on."""

import random
from pathlib import Path

import pytest

from harbortrainer.cli import main
from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.errors import UserError
from harbortrainer.tasks.near_copies import groups, overlap
from harbortrainer.tasks.split import SPLIT_FILE, KeptSplit, on_side, sides_of
from harbortrainer.tasks.task_folder import load_folder

DATASETS = Path(__file__).parents[2] / "datasets"
VOCABULARY = [f"word{number}" for number in range(400)]


def some_words(seed: int, count: int = 60) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=count))


def plant(folder: Path, name: str, *, instruction: str, test: str, dockerfile: str = "FROM debian:12-slim\n") -> None:
    task = folder / name
    for part in ("environment", "tests"):
        (task / part).mkdir(parents=True)
    (task / "task.toml").write_text('version = "1.0"\n')
    (task / "instruction.md").write_text(instruction)
    (task / "tests/test.sh").write_text(test)
    (task / "environment/Dockerfile").write_text(dockerfile)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Ten tasks of their own, in `tasks`, and what could be taken for copies of `task-0` in `others`."""
    for number in range(10):
        plant(tmp_path / "tasks", f"task-{number}", instruction=some_words(number), test=some_words(100 + number))
    told, test, others = some_words(0), some_words(100), tmp_path / "others"
    plant(others, "same-words", instruction=f"# {told.upper()}!", test=test, dockerfile="FROM python:3.12\n")
    plant(
        others, "one-word-changed", instruction=told.replace(f" {told.split()[30]} ", " other ", 1), test=test + " more"
    )
    plant(others, "told-anew", instruction=some_words(7777), test=test)
    plant(others, "same-instruction-other-tests", instruction=told, test=some_words(8888))
    plant(others, "same-tests-other-instruction", instruction=some_words(9999), test=test, dockerfile="FROM alpine\n")
    return tmp_path


def test_copies_are_found_and_nothing_else(planted: Path) -> None:
    found = overlap(load_folder(planted / "tasks"), load_folder(planted / "others"), 0.8)
    assert {(copies.task.name, copies.of.name) for copies in found} == {
        ("same-words", "task-0"),
        ("one-word-changed", "task-0"),
        ("told-anew", "task-0"),
    }
    why = {copies.task.name: copies.why for copies in found}
    assert why["told-anew"] == "the same tests and environment"
    assert why["same-words"] == "alike to 100%" and why["one-word-changed"].startswith("alike to 9")
    equal = overlap(load_folder(planted / "tasks"), load_folder(planted / "others"), 1.0)
    assert {copies.task.name for copies in equal} == {"same-words", "told-anew"}
    assert {copies.why for copies in overlap(*[load_folder(planted / "tasks")] * 2, 0.8)} == {"the same content"}


def test_what_the_verifier_gets_by_its_environment_tells_tasks_apart(tmp_path: Path) -> None:
    for number in range(2):
        plant(tmp_path, f"task-{number}", instruction=some_words(number), test="test $(cat /app/a) = $RIGHT")
        (tmp_path / f"task-{number}/task.toml").write_text(f'[verifier.env]\nRIGHT = "{number}"\n')
    assert len(groups(load_folder(tmp_path), 0.8)) == 2


def test_the_shipped_families_and_samples_are_tasks_of_their_own() -> None:
    train, heldout = (load_folder(DATASETS / "quickstart" / side) for side in ("train", "heldout"))
    samples = load_folder(DATASETS / "harbor_tasks")
    assert len(train) == 8 and len(heldout) == 32 and len(samples) == 13
    assert overlap([*train, *samples], heldout, 0.8) == []
    assert all(len(group) == 1 for group in groups([*train, *heldout, *samples], 0.8))


def test_a_group_of_near_copies_is_on_one_side_whatever_its_size(tmp_path: Path) -> None:
    for family in range(40):
        for member in range(1 + family % 4):
            told, test = some_words(family, 100), some_words(1000 + family, 100)
            plant(tmp_path, f"{member}-{family}", instruction=f"{told} {member}", test=f"{test} {member}")
    tasks = load_folder(tmp_path)
    sides = sides_of(tasks, KeptSplit(eval_share=0.3, near_copy=0.8))
    side_of_family: dict[str, set[str]] = {}
    for name, side in sides.items():
        side_of_family.setdefault(name.split("-")[1], set()).add(side)
    assert all(len(found) == 1 for found in side_of_family.values())
    assert 5 <= sum(found == {"eval"} for found in side_of_family.values()) <= 20
    train, held_out = ([task for task in tasks if sides[task.name] == side] for side in ("train", "eval"))
    assert overlap(train, held_out, 0.8) == []


def test_neither_a_new_name_nor_new_tasks_move_a_task(planted: Path) -> None:
    settings = KeptSplit(eval_share=0.4, near_copy=0.8)
    before = sides_of(load_folder(planted / "tasks"), settings)
    assert set(before.values()) == {"train", "eval"}
    (planted / "tasks/task-3").rename(planted / "tasks/renamed")
    for number in range(20, 60):
        plant(planted / "tasks", f"new-{number}", instruction=some_words(number), test=some_words(100 + number))
    after = sides_of(load_folder(planted / "tasks"), settings)
    assert after["renamed"] == before.pop("task-3")
    assert {name: after[name] for name in before} == before


def test_a_kept_split_moves_nothing_and_leaves_out_what_ties_its_sides(
    planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = planted / "tasks"
    assert main(["tasks", "split", str(folder), "--eval-share", "0.4", "--write"]) == 0
    before = {line for line in capsys.readouterr().out.splitlines() if line.startswith("eval")}
    held_out = {line.split()[1] for line in before}
    assert held_out and (folder / SPLIT_FILE).is_file()
    one, other = next(iter(sorted(held_out))), next(f"task-{n}" for n in range(10) if f"task-{n}" not in held_out)
    for name in (one, other):
        text = (folder / name / "instruction.md").read_text()
        plant(folder, f"copy-of-{name}", instruction=text, test=(folder / name / "tests/test.sh").read_text() + " x")
    (folder / "task-5/instruction.md").write_text(some_words(4242))
    plant(folder, "ties", instruction=some_words(5555), test=some_words(6666))
    table = TasksetKeys(tasks_dir=folder, split="eval")
    played = {task.name for task in on_side(load_folder(folder), table)}
    assert played & {f"task-{n}" for n in range(10)} == held_out
    assert f"copy-of-{one}" in played and f"copy-of-{other}" not in played

    both = [(folder / name / "tests/test.sh").read_text() for name in (one, other)]
    told = [(folder / name / "instruction.md").read_text() for name in (one, other)]
    (folder / "ties/instruction.md").write_text(" ".join(told))
    (folder / "ties/tests/test.sh").write_text(" ".join(both))
    kept = KeptSplit.model_validate_json((folder / SPLIT_FILE).read_bytes()).model_copy(update={"near_copy": 0.3})
    assert sides_of(load_folder(folder), kept)["ties"] == "neither"


def test_a_side_without_tasks_and_a_broken_split_are_told(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = TasksetKeys(tasks_dir=planted / "tasks", split="eval", eval_share=0.0001)
    with pytest.raises(UserError, match="none of the 10 tasks is on the side 'eval'"):
        on_side(load_folder(planted / "tasks"), table)
    (planted / "tasks" / SPLIT_FILE).write_text("{")
    assert main(["tasks", "split", str(planted / "tasks")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and SPLIT_FILE in error and "--write" in error


def test_the_commands_name_what_counts_as_one(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "overlap", str(planted / "tasks"), str(planted / "others")]) == 1
    said = capsys.readouterr().out
    assert "one-word-changed = task-0 (alike to 9" in said and "3 of 5 tasks of" in said
    assert main(["tasks", "overlap", str(DATASETS / "harbor_tasks"), str(DATASETS / "quickstart/heldout")]) == 0
    assert main(["tasks", "split", str(planted / "others")]) == 0
    said = capsys.readouterr().out
    assert "count as one: one-word-changed" in said and "same-instruction-other-tests (" not in said
