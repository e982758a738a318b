"""`tasks list` reports the values that Harbor uses."""

import json
from pathlib import Path

import pytest
from task_sets import make_task

from harbortrainer.cli import main
from harbortrainer.errors import UserError
from harbortrainer.sandbox.environment_types import environment_config
from harbortrainer.tasks.measured_rates import MeasuredRate, MeasuredRates, write_rates
from harbortrainer.tasks.passed_checks import record_passed
from harbortrainer.tasks.task_folder import load_task
from harbortrainer.tasks.task_listing import TaskRow, base_image, task_row

PLAIN = """
[environment]
network_mode = "no-network"
cpus = 2
memory_mb = 512
[agent]
timeout_sec = 90
[verifier]
timeout_sec = 30
environment_mode = "separate"
"""
STEPS = """
[agent]
timeout_sec = 100
[verifier]
timeout_sec = 30
[environment]
docker_image = "python:3.12"
[[steps]]
name = "one"
[steps.agent]
timeout_sec = 50
network_mode = "no-network"
[[steps]]
name = "two"
[steps.verifier]
environment_mode = "separate"
timeout_sec = 20
"""


def row(folder: Path, toml: str, **known) -> TaskRow:
    task = make_task(folder)
    (task / "task.toml").write_text(toml)
    for step in ("one", "two"):
        (task / "steps" / step).mkdir(parents=True)
        (task / "steps" / step / "instruction.md").write_text(step)
    return task_row(load_task(task), known.get("checked", {}), known.get("rates", {}))


def test_row_has_task_requirements(tmp_path: Path) -> None:
    found = row(tmp_path / "t", PLAIN)
    assert (found.steps, found.verifier, found.network, found.image) == (1, "separate", "no-network", "")
    assert (found.cpus, found.memory_mb, found.storage_mb, found.gpus) == (2, 512, None, None)
    assert (found.agent_s, found.verifier_s, found.build_s) == (90, 30, 600)
    assert (found.checked, found.pass_rate, found.attempts) == ([], None, None)


def test_row_adds_up_step_limits(tmp_path: Path) -> None:
    found = row(tmp_path / "t", STEPS)
    assert (found.steps, found.verifier, found.image) == (2, "shared, separate", "python:3.12")
    assert found.network == "no-network, public"
    assert (found.agent_s, found.verifier_s) == (50 + 100, 600 + 20)


async def test_harbor_trial_uses_these_step_limits(tmp_path: Path) -> None:
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.multi_step import MultiStepTrial
    from harbor.trial.trial import Trial

    found = row(tmp_path / "t", STEPS.replace('network_mode = "no-network"\n', ""))
    config = TrialConfig(
        task=TaskConfig(path=tmp_path / "t"),
        trials_dir=tmp_path / "trials",
        agent=AgentConfig(name="nop"),
        environment=EnvironmentConfig(**environment_config("local", {"image": "build"})),
    )
    trial = await Trial.create(config)
    assert isinstance(trial, MultiStepTrial)
    given = [trial._step_verifier_timeout_sec(step) for step in trial.task.config.steps or []]
    assert given == [600, 20], "without a time of its own a step's verifier has Harbor's, not the task's"
    assert found.verifier_s == 600 + 20


def test_row_has_no_limit_without_agent_timeout(tmp_path: Path) -> None:
    assert row(tmp_path / "t", "").agent_s is None


def test_base_image_is_that_of_last_stage(tmp_path: Path) -> None:
    assert base_image(tmp_path) == ""
    (tmp_path / "Dockerfile").write_text("ARG V=12\nFROM python:3 AS build\nRUN true\nFROM debian:${V}\n")
    assert base_image(tmp_path) == "debian:12"
    (tmp_path / "docker-compose.yaml").write_text("")
    assert base_image(tmp_path) == "compose"


def test_dockerfile_may_have_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_bytes(b"\xef\xbb\xbfFROM debian:12\n")
    assert base_image(tmp_path) == "debian:12"


def test_reports_non_utf8_dockerfile(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_bytes(b"# caf\xe9\nFROM debian:12\n")
    with pytest.raises(UserError, match="the Dockerfile is not UTF-8 text; correct the Dockerfile"):
        base_image(tmp_path)


def test_reports_key_that_harbor_rejects(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.toml: environment\.cpus"):
        row(tmp_path / "t", '[environment]\ncpus = "many"\n')


def test_list_prints_table_or_json(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    task = load_task(make_task(tmp_path / "tasks" / "a", "Do a."))
    make_task(tmp_path / "tasks" / "b", "Do b.")
    (tmp_path / "tasks" / "bad").mkdir()
    (tmp_path / "tasks" / "bad" / "instruction.md").touch()
    record_passed([task], "docker")
    rate = MeasuredRate(name="a", attempts=8, pass_rate=0.25, mean_reward=0.3)
    write_rates(tmp_path / "rates.json", MeasuredRates(tasks={task.key: rate}))
    assert main(["tasks", "list", "tasks", "--difficulty", "rates.json"]) == 1
    head, first, second, count, bad = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["task", "steps"] and head.endswith("pass rate")
    assert first.startswith("a ") and "docker" in first and "0.25 of 8" in first
    assert second.startswith("b ") and second.rstrip().endswith("-")
    assert count == "2 tasks, 1 checked" and bad.startswith("BAD ") and "no task.toml" in bad
    assert main(["tasks", "list", "tasks", "--difficulty", "rates.json", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["checked"], row["pass_rate"]) for row in found["tasks"]] == [
        ("a", ["docker"], 0.25),
        ("b", [], None),
    ]
    assert found["tasks"][0]["task_key"] == task.key and len(found["unreadable"]) == 1
    assert main(["tasks", "list", "nowhere"]) == 2
    assert main(["tasks", "list", "tasks", "--difficulty", "none.json"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_list_replaces_control_characters(tmp_path: Path, capsys) -> None:
    make_task(tmp_path / "tasks" / "a\x1b[2Jb")
    assert main(["tasks", "list", str(tmp_path / "tasks")]) == 0
    assert "\x1b[2J" not in capsys.readouterr().out
