"""Commands without a run file refuse an unusable sandbox or model before they build or download anything."""

import os
import time
from pathlib import Path

import pytest
from fakes import make_task

from harbortrainer.cli import main
from harbortrainer.doctor import machine_checks
from harbortrainer.errors import EXIT_USER_ERROR

pytestmark = pytest.mark.process


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_task(tmp_path / "tasks" / "one")
    return tmp_path / "tasks"


def error_of(capfd: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == EXIT_USER_ERROR
    return capfd.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("command", ["rollout", "eval", "tasks check"])
def test_unknown_environment_gets_nearest_name(tasks: Path, capfd: pytest.CaptureFixture[str], command: str) -> None:
    source = tasks / "one" if command == "rollout" else tasks
    extra = [] if command == "tasks check" else ["--agent", "oracle"]
    line = error_of(capfd, *command.split(), source, "--environment", "dokcer", *extra)
    assert "--environment" in line and "did you mean" in line and "docker" in line


@pytest.mark.parametrize("command", ["rollout", "eval", "tasks check"])
def test_local_sandbox_that_cannot_start_is_refused(
    tasks: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(machine_checks, "missing_tools", lambda: ["tmux"])
    source = tasks / "one" if command == "rollout" else tasks
    extra = [] if command == "tasks check" else ["--agent", "oracle"]
    line = error_of(capfd, *command.split(), source, "--environment", "local", *extra)
    assert "tmux not found" in line and "apt-get install tmux" in line


@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_unreachable_hub_fails_in_seconds(
    tasks: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    source = tasks / "one" if command == "rollout" else tasks
    began = time.monotonic()
    line = error_of(capfd, command, source, "--model", "org/model", "--environment", "local")
    assert "org/model" in line and "reach" in line
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("command", ["rollout", "eval", "tasks check"])
def test_stopped_docker_daemon_fails_before_a_build(
    tasks: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text('#!/bin/sh\necho "$@" >> "$DOCKER_CALLS"\nexit 1\n')
    (tmp_path / "bin/docker").chmod(0o755)
    monkeypatch.setenv("DOCKER_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    source = tasks / "one" if command == "rollout" else tasks
    words = [*command.split(), source, "--environment", "docker", *["--agent", "oracle"] * (command != "tasks check")]
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    line = error_of(capfd, *words)
    assert "the daemon does not answer; start it" in line and "--environment local" in line
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    line = error_of(capfd, *words)
    assert "the daemon at DOCKER_HOST (tcp://127.0.0.1:9) does not answer; correct or unset DOCKER_HOST" in line
    calls = (tmp_path / "calls").read_text().splitlines()
    assert {call.split()[0] for call in calls} == {"info"}, "nothing was built"
