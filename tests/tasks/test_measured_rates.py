"""Measured pass rates: filter, changed tasks, and no overwriting of other files."""

from pathlib import Path

import pytest

from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.environment.plugin_config import HarborTasksetConfig
from harbortrainer.environment.taskset import HarborTaskset
from harbortrainer.errors import UserError
from harbortrainer.tasks.measured_rates import MeasuredRate, MeasuredRates, filter_by_pass_rate, read_rates, write_rates
from harbortrainer.tasks.task_folder import TaskRef, load_folder

RATES = {"never": 0.0, "seldom": 0.25, "always": 1.0}


def make_tasks(folder: Path) -> list[TaskRef]:
    for name in [*RATES, "new"]:
        (folder / name).mkdir(parents=True)
        (folder / name / "task.toml").write_text('version = "1.0"\n')
        (folder / name / "instruction.md").write_text(f"Do {name}.")
    return load_folder(folder)


@pytest.fixture
def measured(tmp_path: Path) -> tuple[list[TaskRef], Path]:
    tasks, file = make_tasks(tmp_path / "tasks"), tmp_path / "rates.json"
    known = {
        task.key: MeasuredRate(name=task.name, attempts=4, pass_rate=RATES[task.name], mean_reward=RATES[task.name])
        for task in tasks
        if task.name in RATES
    }
    write_rates(file, MeasuredRates(policy="some model", tasks=known))
    return tasks, file


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({}, ["always", "never", "new", "seldom"]),
        ({"min_pass_rate": 0.01}, ["always", "seldom"]),
        ({"max_pass_rate": 0.99}, ["never", "seldom"]),
        ({"min_pass_rate": 0.25, "max_pass_rate": 0.25}, ["seldom"]),
        ({"max_pass_rate": 0.0}, ["never"]),
    ],
)
def test_pass_rate_limits_are_inclusive_and_exclude_unmeasured_tasks(measured, keys: dict, names: list[str]) -> None:
    tasks, file = measured
    assert [task.name for task in filter_by_pass_rate(tasks, TasksetKeys(difficulty=file, **keys))] == names


def test_taskset_filters_by_pass_rate(measured) -> None:
    tasks, file = measured
    config = HarborTasksetConfig(tasks_dir=tasks[0].path.parent, difficulty=file, min_pass_rate=0.1, max_pass_rate=0.9)
    assert [task.data.name for task in HarborTaskset(config).load()] == ["seldom"]


def test_changed_task_is_unmeasured(measured) -> None:
    tasks, file = measured
    (tasks[-1].path / "instruction.md").write_text("Do it otherwise.")
    again = load_folder(tasks[0].path.parent)
    assert [task.name for task in filter_by_pass_rate(again, TasksetKeys(difficulty=file, min_pass_rate=0.0))] == [
        "always",
        "never",
    ]


def test_no_matching_task_is_an_error(measured) -> None:
    tasks, file = measured
    with pytest.raises(UserError, match=r"none of the 4 tasks has a pass rate of 0.5 to 0.6 \(1 were not measured\)"):
        filter_by_pass_rate(tasks, TasksetKeys(difficulty=file, min_pass_rate=0.5, max_pass_rate=0.6))


def test_refuses_conflicting_difficulty_keys() -> None:
    with pytest.raises(ValueError, match="min_pass_rate needs difficulty"):
        TasksetKeys(min_pass_rate=0.1)
    with pytest.raises(ValueError, match="is above max_pass_rate"):
        TasksetKeys(difficulty=Path("x"), min_pass_rate=0.6, max_pass_rate=0.5)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"tasks": {"k": {"name": "a"}}}', '{"model": "x", "tasks": {}}'])
def test_never_overwrites_another_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(UserError, match="not a file of measured pass rates"):
        read_rates(file)
    with pytest.raises(UserError, match="will not be overwritten"):
        write_rates(file, MeasuredRates(tasks={}))
    assert file.read_text() == text


def test_reports_missing_rates_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_rates(tmp_path / "none.json")
