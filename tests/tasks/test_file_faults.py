"""Detection of shell scripts with Windows line endings."""

from pathlib import Path

import pytest

from harbortrainer.tasks.task_check import crlf_scripts, crlf_warning

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


def test_finds_crlf_shell_scripts_in_every_task_folder(task: Path) -> None:
    assert crlf_scripts(task, {"environment": {"os": "linux"}}) == crlf_scripts(task, {}) == list(SCRIPTS)


def test_ignores_crlf_scripts_of_windows_tasks(task: Path) -> None:
    assert crlf_scripts(task, {"environment": {"os": "windows"}}) == []


def test_crlf_warning_lists_first_scripts() -> None:
    assert "in a, b, c and 2 more: " in crlf_warning(list("abcde")) and "in a, b, c: " in crlf_warning(list("abc"))
