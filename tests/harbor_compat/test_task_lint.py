"""Findings of `harbor lint` where the installed Harbor has it, and none elsewhere."""

from pathlib import Path

import pytest

from harbortrainer.harbor_compat.task_lint import LINT, has_lint, lint_findings
from harbortrainer.private_apis import fault_at

with_lint = pytest.mark.skipif(not has_lint(), reason="a Harbor without lint")
SHARED = "task.toml [shared-verifier]"
UNPINNED = "tests/test.sh:2 [unpinned-python-dependency]"
COMPOSE = "services:\n  main:\n    privileged: true\n"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    for folder in ("environment", "tests"):
        (tmp_path / "set/task" / folder).mkdir(parents=True)
    task = tmp_path / "set/task"
    (task / "task.toml").write_text('version = "1.0"\n')
    (task / "instruction.md").write_text("Make the file /app/done.")
    (task / "environment/Dockerfile").write_text("FROM debian:12-slim\n")
    (task / "tests/test.sh").write_text("#!/bin/bash\npip install pytest\n")
    return task


def starts(task: Path) -> list[str]:
    """The findings without their messages."""
    return [finding.partition("] ")[0] + "]" for finding in lint_findings(task)]


@pytest.mark.skipif(has_lint(), reason="a Harbor with lint")
def test_older_harbor_has_no_findings(task: Path) -> None:
    assert lint_findings(task) == []


@with_lint
@pytest.mark.parametrize("place", LINT.places)
def test_installed_harbor_selects_rules_as_expected(place: str) -> None:
    assert fault_at(place) == ""


@with_lint
def test_findings_have_file_line_and_rule(task: Path) -> None:
    assert starts(task) == [SHARED, UNPINNED]
    assert all(finding.count("\n") == 0 and len(finding) > len(UNPINNED) for finding in lint_findings(task))


@with_lint
@pytest.mark.parametrize(
    ("file", "found"), [("task.toml", [UNPINNED]), ("../dataset.toml", [UNPINNED]), ("../../dataset.toml", [UNPINNED])]
)
def test_selection_of_task_and_set_counts(task: Path, file: str, found: list[str]) -> None:
    with (task / file).open("a") as opened:
        opened.write('[metadata.harbor.lint]\nignore = ["shared-verifier"]\n')
    assert starts(task) == found


@with_lint
def test_compose_is_not_run(task: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(docker.parent), prepend=":")
    (task / "environment/docker-compose.yaml").write_text(COMPOSE)
    assert starts(task) == [SHARED, UNPINNED]
    assert not (tmp_path / "ran").exists()


@with_lint
def test_unreadable_selection_is_one_line(task: Path) -> None:
    (task.parent / "dataset.toml").write_text('[metadata.harbor.lint]\nignore = ["no-such-rule"]\n')
    (finding,) = lint_findings(task)
    assert "cannot read this task or its selection of rules (BadParameter)" in finding
