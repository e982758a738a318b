"""The label of a run, and whether the owner of a sandbox still runs."""

import os
import shutil
from pathlib import Path

import pytest

from harbortrainer.runs.label import (
    OWNER_VARIABLE,
    RUN_VARIABLE,
    owner_of_process,
    owner_state,
    run_label,
    run_labels,
    this_owner,
)


def test_label_stays_the_same_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    label = run_label(tmp_path / "run")
    assert label.startswith("run-") and run_label(tmp_path / "run") == label


def test_copied_and_replaced_folder_have_other_labels(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    label = run_label(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copies" / "run")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()  # as at the same path on another machine
    assert len({label, run_label(tmp_path / "copies" / "run"), run_label(tmp_path / "run")}) == 3


def owner(**changes: str) -> str:
    """Return this process as an owner, with some parts replaced."""
    parts = dict(zip(("user", "pid", "start", "machine"), owner_of_process(os.getpid()).split("."), strict=True))
    return ".".join((parts | changes).values())


def test_owner_state() -> None:
    assert owner_state(owner()) == "running"
    assert owner_state(owner(start="1")) == "ended", "its process id was given to another process"
    assert owner_state(owner(pid="4194305")) == "ended"
    assert owner_state(owner(machine="elsewhere")) == "unknown"
    assert owner_state(owner(user="4194305")) == "of another user"
    assert [owner_state(text) for text in ("", "none", "0.x.1.m", "....")] == ["unknown"] * 4


def test_sandbox_names_its_run_and_the_process_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    monkeypatch.setenv(OWNER_VARIABLE, "")
    assert run_labels() == {"harbortrainer.run": "none", "harbortrainer.owner": owner()}
    monkeypatch.setenv(RUN_VARIABLE, "r-1")
    monkeypatch.setenv(OWNER_VARIABLE, "the-run")
    assert run_labels("-") == {"harbortrainer-run": "r-1", "harbortrainer-owner": "the-run"}
    assert this_owner() == "the-run"
