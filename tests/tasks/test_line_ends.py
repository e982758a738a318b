"""Shell scripts with Windows line ends, wherever a task has them, and nothing else."""

from pathlib import Path

import pytest

from harbortrainer.tasks.line_ends import told, windows_scripts

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


def test_the_shell_scripts_of_every_part_are_found_and_nothing_else(task: Path) -> None:
    assert windows_scripts(task, {"environment": {"os": "linux"}}) == windows_scripts(task, {}) == list(SCRIPTS)


def test_a_task_that_windows_runs_has_them_for_a_reason(task: Path) -> None:
    assert windows_scripts(task, {"environment": {"os": "windows"}}) == []


def test_of_many_some_are_named() -> None:
    assert "in a, b, c and 2 more: " in told(list("abcde")) and "in a, b, c: " in told(list("abc"))
