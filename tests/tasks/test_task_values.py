"""Time limits and sizes that no sandbox can use are refused when a task is loaded, with file and key."""

import json
from pathlib import Path

import pytest
from harbor.models.task.config import TaskConfig
from task_sets import make_task

from harbortrainer.cli import main
from harbortrainer.errors import UserError
from harbortrainer.tasks.task_folder import load_folder, load_task

REPO = Path(__file__).parents[2]
BAD_TIMES = ("inf", "-inf", "nan", "0", "0.0", "-1", "-0.5", '"inf"', '"-5"', "false")
HEALTHCHECK = '[environment.healthcheck]\ncommand = "true"\n'
TIMES = (
    ("[agent]\ntimeout_sec", "agent.timeout_sec"),
    ("[verifier]\ntimeout_sec", "verifier.timeout_sec"),
    ("[environment]\nbuild_timeout_sec", "environment.build_timeout_sec"),
    ("[verifier.environment]\nbuild_timeout_sec", "verifier.environment.build_timeout_sec"),
    (f"{HEALTHCHECK}timeout_sec", "environment.healthcheck.timeout_sec"),
    ('[[verifier.collect]]\ncommand = "a"\ntimeout_sec', "verifier.collect.timeout_sec"),
    ('[[steps]]\nname = "a"\n[steps.agent]\ntimeout_sec', "steps.a.agent.timeout_sec"),
    ('[[steps]]\nname = "a"\n[steps.verifier]\ntimeout_sec', "steps.a.verifier.timeout_sec"),
)
SIZES = (
    ("environment", "cpus", "-1"),
    ("environment", "memory_mb", "-1"),
    ("environment", "storage_mb", "-1024"),
    ("environment", "gpus", "-1"),
    ("environment", "memory", '"-2G"'),
    ("environment", "storage", '"-1 m"'),
    ("verifier.environment", "memory_mb", '"-5"'),
)
GOOD = (
    "[agent]\ntimeout_sec = 0.5\n[verifier]\ntimeout_sec = 86400",
    '[agent]\ntimeout_sec = "600"\n[verifier]\ntimeout_sec = true',
    "[environment]\ncpus = 0\nmemory_mb = 0\nstorage_mb = 0\ngpus = 0\nbuild_timeout_sec = 1e6",
    '[environment]\nmemory = "2G"\nstorage = "512 M"',
    f"{HEALTHCHECK}interval_sec = 0.0\nstart_period_sec = 0.0\nretries = 0",
    "[metadata]\ntimeout_sec = -1\n[notes]\nmemory_mb = -1",
)


@pytest.mark.parametrize("value", BAD_TIMES)
@pytest.mark.parametrize(("toml", "key"), TIMES)
def test_load_refuses_time_limit(tmp_path: Path, toml: str, key: str, value: str) -> None:
    task = make_task(tmp_path / "one")
    (task / "task.toml").write_text(f"{toml} = {value}\n")
    TaskConfig.model_validate_toml((task / "task.toml").read_text())  # Harbor accepts it
    with pytest.raises(UserError, match=rf"{key} = .* must be finite and above 0; correct the numbers") as refused:
        load_task(task)
    assert refused.value.where == str(task / "task.toml")


@pytest.mark.parametrize(("table", "key", "value"), SIZES)
def test_load_refuses_negative_size(tmp_path: Path, table: str, key: str, value: str) -> None:
    task = make_task(tmp_path / "one")
    (task / "task.toml").write_text(f"[{table}]\n{key} = {value}\n")
    TaskConfig.model_validate_toml((task / "task.toml").read_text())  # Harbor accepts it
    with pytest.raises(UserError, match=rf"{table}\.{key} = .* must be finite and not negative"):
        load_task(task)


def test_load_refuses_infinite_size(tmp_path: Path) -> None:
    """Harbor's own error names no key."""
    task = make_task(tmp_path / "one")
    (task / "task.toml").write_text('[environment]\nmemory = "infG"\n')
    with pytest.raises(UserError, match=r"environment\.memory = 'infG' must be finite"):
        load_task(task)


def test_all_bad_numbers_are_one_line(tmp_path: Path) -> None:
    task = make_task(tmp_path / "one")
    (task / "task.toml").write_text("[agent]\ntimeout_sec = inf\n[environment]\nmemory_mb = -1\n")
    with pytest.raises(UserError) as refused:
        load_task(task)
    assert str(refused.value) == (
        f"{task / 'task.toml'}: agent.timeout_sec = inf must be finite and above 0; "
        "environment.memory_mb = -1 must be finite and not negative; correct the numbers, or remove the keys"
    )


@pytest.mark.parametrize("toml", GOOD)
def test_load_keeps_what_harbor_can_use(tmp_path: Path, toml: str) -> None:
    task = make_task(tmp_path / "one")
    (task / "task.toml").write_text(toml)
    TaskConfig.model_validate_toml(toml)
    assert load_task(task).name == "one"


@pytest.mark.parametrize("value", BAD_TIMES)
def test_list_prints_valid_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    make_task(tmp_path / "good", "Good.")
    (make_task(tmp_path / "bad") / "task.toml").write_text(f"[agent]\ntimeout_sec = {value}\n")
    assert main(["tasks", "list", str(tmp_path), "--json"]) == 1

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert [row["name"] for row in found["tasks"]] == ["good"]
    assert "bad/task.toml: agent.timeout_sec = " in found["unreadable"][0]


@pytest.mark.parametrize("folder", ["harbor_tasks", "quickstart"])
def test_sample_tasks_load(folder: str) -> None:
    tasks = REPO / "datasets" / folder
    assert len(load_folder(tasks)) == len(list(tasks.rglob("task.toml"))) > 0


@pytest.mark.parametrize(
    "name",
    [
        "one/two",
        "a.b-c_d/1",
        "alone",
        "",
        "/two",
        "one/",
        "a/b/c",
        ".a/b",
        "a/.b",
        "a/b..c",
        "a b/c",
        "a/b\n",
        "\u00e4/b",
    ],
)
def test_refuses_the_task_names_that_harbor_refuses(name: str, tmp_path: Path) -> None:
    try:
        TaskConfig.model_validate({"task": {"name": name}})
    except ValueError:
        refused = True
    else:
        refused = False
    (make_task(tmp_path / "t") / "task.toml").write_text(f"[task]\nname = {json.dumps(name)}\n")
    if refused:
        with pytest.raises(UserError, match=r"task.name: .* is not ORGANIZATION/NAME, which Harbor requires"):
            load_task(tmp_path / "t")
    else:
        assert load_task(tmp_path / "t").n_steps == 1
