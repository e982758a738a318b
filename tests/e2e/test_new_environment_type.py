"""An environment type needs one class and one registry entry to work in training, `doctor` and `tasks check`."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import DONE, keys, make_task
from plugin_runs import config, play_one
from project_folder import RUN_FILE, write_project
from scripted_engine import ScriptedEngine, by_turn
from toy_environment import TOY, ToyEnvironment

from harbortrainer.cli import main
from harbortrainer.config.environment_table import ENVIRONMENT_TYPES, EnvironmentEntry
from harbortrainer.config.plugin import HarnessKeys
from harbortrainer.doctor import credentials, machine_checks
from harbortrainer.sandbox.environment_types import environment_config
from harbortrainer.tasks.passed_checks import passed_environments

pytestmark = pytest.mark.e2e

SOLVES = by_turn([keys("mkdir -p /app && touch /app/answer", duration=1.0), DONE, DONE])
ON_HOST = {"image": "host"}


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Register the type `toy`; return the list of task names that it will run."""
    monkeypatch.setitem(ENVIRONMENT_TYPES, "toy", TOY)
    monkeypatch.setattr(ToyEnvironment, "played", names := [])
    return names


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a run file with the type `toy` to the current folder."""
    monkeypatch.chdir(write_project(tmp_path))
    toy = 'environment_type = "toy", environment_kwargs = { image = "host" }'
    Path("run.toml").write_text(RUN_FILE.replace('environment_type = "local"', toy))
    return Path("run.toml")


def doctor(run_file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run `harbortrainer doctor`; return its exit code and its table as one line."""
    code = main(["doctor", "--config", str(run_file), "--engine", "local"])
    return code, " ".join(capsys.readouterr().out.replace("│", " ").split())


async def test_new_type_runs_trial_through_plugin(tmp_path: Path, tokenizer_dir: Path, played: list[str]) -> None:
    make_task(tmp_path / "tasks" / "answer")
    harness = {"environment_type": "toy", "environment_kwargs": ON_HOST, "leftovers": "kill", "on_tampering": "zero"}
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=harness), engine)
    record = trace.info["harbor"]
    assert (trace.ok, trace.reward, record["outcome"], record["environment_type"]) == (True, 1.0, "completed", "toy")
    assert "/app/answer" in str(record["changed_files"]), "the class reports changes"
    assert played == ["answer"]


async def test_type_without_capabilities_runs_trial(
    tmp_path: Path, tokenizer_dir: Path, played: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT_TYPES, "toy", EnvironmentEntry(TOY.import_path))
    make_task(tmp_path / "tasks" / "answer")
    harness = {"environment_type": "toy", "environment_kwargs": ON_HOST}
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=harness), engine)
    assert (trace.ok, trace.reward, played) == (True, 1.0, ["answer"])
    with pytest.raises(ValueError, match='leftovers = "kill" needs environment_type local or docker, not toy'):
        HarnessKeys(environment_type="toy", leftovers="kill")
    with pytest.raises(ValueError, match="toy does not detect changed tools"):
        HarnessKeys(environment_type="toy", on_tampering="zero")


def test_doctor_starts_sandbox_for_run_file(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = doctor(run_file, capsys)
    assert code == 0, output
    assert "green local sandbox a test sandbox started and stopped" in output
    assert "unknown environment type" not in output and "Docker" not in output


def test_doctor_names_unsupported_task_and_missing_tool(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "missing_tools", lambda: ["tmux"])
    Path("tasks/one/environment/docker-compose.yaml").write_text("services: {}\n")
    code, output = doctor(run_file, capsys)
    assert code == 2
    assert "environment_type = 'toy' cannot run 1 task: one (environment/docker-compose.yaml)" in output
    assert "red local sandbox tmux not found" in output


def test_tasks_check_remembers_where_task_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, played: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    test = "mkdir -p /logs/verifier; [ -f /app/answer ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    make_task(tmp_path / "tasks" / "answer", test=test)
    options = ["--environment", "toy", "--environment-kwarg", "image=host"]
    assert main(["tasks", "check", "tasks", *options, "--repeats", "1", "--cheats", "none"]) == 0
    assert "1 of 1 tasks are fit to train on" in capsys.readouterr().out
    assert played == ["answer", "answer"], "oracle and nop"
    assert [*passed_environments().values()] == [["toy"]]


def test_remote_type_checks_its_own_credentials(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_key() -> None:
        raise SystemExit("TOY_KEY is not set")

    monkeypatch.setitem(ENVIRONMENT_TYPES, "toy", replace(TOY, needs_namespaces=False, remote=True))
    monkeypatch.setattr(ToyEnvironment, "preflight", no_key)
    assert credentials.provider_problem("toy") == "TOY_KEY is not set"
    code, output = doctor(run_file, capsys)
    assert code == 2 and "red sandboxes: toy TOY_KEY is not set" in output


def test_unknown_type_is_refused_with_registered_names() -> None:
    with pytest.raises(Exception, match=r"use one of auto, local, .*toy") as caught:
        environment_config("nonsense")
    assert "unknown environment type 'nonsense'" in str(caught.value)
    with pytest.raises(Exception, match=r"unknown environment type 'tay'; did you mean 'toy'"):
        environment_config("tay")
