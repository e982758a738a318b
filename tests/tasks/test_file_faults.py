"""Faults in a task's files: Windows line endings, and installations without a network."""

from pathlib import Path

import pytest

from harbortrainer.config.table import TomlTable
from harbortrainer.sandbox.task_requirements import TaskRequirements
from harbortrainer.tasks.file_faults import faults

SCRIPTS = {
    "environment/begin": b"#!/usr/bin/env bash\r\n",
    "solution/parts/help.sh": b"set -e\r\n",
    "steps/one/solution/solve.sh": b"#!/bin/bash -e\r\ntrue\r\n",
    "steps/one/tests/test.sh": b"#!/bin/sh\r\n",
    "steps/one/workdir/setup.sh": b"\r\n",
    "tests/test.sh": b"#!/bin/bash\r\n",
}
OTHERS = {
    "instruction.md": b"Make it.\r\n",
    "notes.sh": b"#!/bin/bash\r\n",
    "environment/table.csv": b"a,b\r\n",
    "environment/hash": b"#!/usr/bin/hash\r\n",
    "environment/empty.sh": b"",
    "tests/check.py": b"#!/usr/bin/env python3\r\n",
    "tests/one-line.sh": b"true",
    "tests/fine.sh": b"#!/bin/bash\nprintf '\r\n'\n",
}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    for name, text in (SCRIPTS | OTHERS).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    return tmp_path


def found(task: Path, config: TomlTable | None = None) -> dict[str, str]:
    return {
        finding.what: finding.category for finding in faults(TaskRequirements(task, config or {}), verifier_lacks=True)
    }


def test_finds_crlf_shell_scripts_in_every_task_folder(task: Path) -> None:
    (what,) = found(task, {"environment": {"os": "linux"}})
    first = ", ".join(list(SCRIPTS)[:3])
    assert f"in {first} and {len(SCRIPTS) - 3} more: remove them (sed -i 's/\\r$//' FILE)" in what
    for script in SCRIPTS:
        (task / script).unlink()
    assert found(task) == {}


def test_ignores_crlf_scripts_of_windows_tasks(task: Path) -> None:
    assert found(task, {"environment": {"os": "windows"}}) == {}


def test_finds_patches_with_windows_line_endings(tmp_path: Path) -> None:
    (tmp_path / "solution").mkdir()
    (tmp_path / "solution/fix.patch").write_bytes(b"--- a\n+++ b\n@@ -1 +1 @@\n-a\r\n+b\r\n")
    (tmp_path / "solution/fine.diff").write_bytes(b"--- a\n+++ b\n")
    (tmp_path / "solution/table.csv").write_bytes(b"a\r\n")
    what = "Windows line endings in patches, which do not apply to files with Unix ones: solution/fix.patch"
    assert found(tmp_path) == {what: "task"}


CLOSED: TomlTable = {"network_mode": "no-network"}


@pytest.mark.parametrize(
    ("config", "script", "install"),
    [
        ({"environment": CLOSED}, "set -e\napt-get -qq update\n", "apt-get -qq update"),
        ({"environment": {"allow_internet": False}}, "uvx pytest /tests\n", "uvx"),
        ({"verifier": CLOSED}, "curl -LsSf https://astral.sh/uv/install.sh | sh", "curl -LsSf https://astral.sh"),
        ({"environment": CLOSED}, "# apt-get update\npytest /tests\n", ""),
        ({"environment": CLOSED}, "curl -f http://localhost:8080/health\n", ""),
        ({}, "pip install pytest\n", ""),
        ({"agent": CLOSED}, "pip install pytest\n", ""),
        ({"environment": CLOSED, "verifier": {"network_mode": "public"}}, "pip install pytest\n", ""),
        ({"environment": CLOSED, "verifier": {"environment": {"docker_image": "a"}}}, "pip install pytest\n", ""),
    ],
)
def test_names_what_a_verifier_without_network_installs(
    config: TomlTable, script: str, install: str, tmp_path: Path
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test.sh").write_text(script)
    what = f"the verifier has no network, but installs software (tests/test.sh: {install}): do it in the Dockerfile"
    assert found(tmp_path, config) == ({what: "verifier"} if install else {})


def test_reads_the_verifiers_of_steps_and_their_networks(tmp_path: Path) -> None:
    (tmp_path / "steps/two/tests").mkdir(parents=True)
    (tmp_path / "steps/two/tests/test.sh").write_text("npm ci\n")
    steps: TomlTable = {"steps": [{"name": "one"}, {"name": "two", "verifier": CLOSED}]}
    assert "(steps/two/tests/test.sh: npm ci)" in "".join(found(tmp_path, steps))
    assert found(tmp_path, {"verifier": CLOSED, "steps": [{"name": "two"}]}) == {}
