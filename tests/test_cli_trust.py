"""A task that takes a key of the user's is refused by every command that would start it, until it is trusted."""

from pathlib import Path

import pytest
from project_folder import write_project

from harbortrainer.cli import main

TRAIN = ["train", "--config", "run.toml", "--engine", "local"]
ACCESS = "[verifier.env] JUDGE is $OPENAI_API_KEY of this machine"
KEY_LINE = 'trusted_tasks = ["one"]'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose task has a judge with the user's key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-user")
    folder = write_project(tmp_path)
    (folder / "tasks/one/task.toml").write_text('version = "1.0"\n[verifier.env]\nJUDGE = "${OPENAI_API_KEY}"\n')
    return folder


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (TRAIN, f"add `{KEY_LINE}` to [env.agent.harness]"),
        ([*TRAIN, "--dry-run"], f"add `{KEY_LINE}` to [env.agent.harness]"),
        (["eval", "tasks", "--agent", "oracle"], "pass `--trust one`"),
        (["eval", "tasks", "--agent", "oracle", "--trust", "other"], "pass `--trust one`"),
        (["rollout", "tasks/one", "--agent", "oracle"], "pass `--trust one`"),
    ],
)
def test_exposed_task_is_refused_before_anything_starts(
    project: Path, capfd: pytest.CaptureFixture[str], words: list[str], remedy: str
) -> None:
    assert main(words) == 2
    line = capfd.readouterr().err.strip()
    assert "\n" not in line
    assert f"one ({ACCESS})" in line and remedy in line
    assert not (project / "outputs").exists()


def test_check_doctor_and_list_name_the_access(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "check", "tasks"]) == 1
    out = capfd.readouterr().out
    assert f"BAD  one  refused, since it can access this machine: {ACCESS}; " in out and "pass `--trust one`" in out
    assert main(["doctor", "--config", "run.toml", "--engine", "local"]) != 0
    assert "sandboxes can access this machine" in " ".join(capfd.readouterr().out.split())
    assert main(["tasks", "list", "tasks"]) == 0
    assert f"  one: {ACCESS}" in capfd.readouterr().out


def test_line_of_the_message_allows_the_task(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = project / "run.toml"
    file.write_text(file.read_text().replace("harness = { ", f"harness = {{ {KEY_LINE}, "))
    assert main([*TRAIN, "--dry-run"]) == 0
    out = capfd.readouterr().out
    assert "yellow" in out and "sandboxes can access this machine" in out


def test_option_allows_the_task(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "tasks/one/environment/docker-compose.yaml").write_text("services: {}")
    assert main(["eval", "tasks", "--agent", "oracle", "--environment", "local", "--trust", "o*"]) == 2
    assert "environment/docker-compose.yaml" in capfd.readouterr().err, "the next reason to refuse it"
