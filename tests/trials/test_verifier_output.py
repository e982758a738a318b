"""Kept output of a verifier, in a folder to which an agent can write."""

import os
from pathlib import Path

from harbortrainer.trials.verifier_output import HEAD_CHARS, TAIL_CHARS, verifier_output


def printed(folder: Path, text: str) -> Path:
    (folder / "verifier").mkdir(parents=True)
    file = folder / "verifier" / "test-stdout.txt"
    file.write_text(text)
    return file


def test_output_of_steps_has_the_tasks_order(tmp_path: Path):
    printed(tmp_path / "steps/test", "1 failed\n")
    printed(tmp_path / "steps/build", "1 passed\n")
    steps = ["test", "not reached", "build"]
    assert verifier_output(tmp_path, steps=steps) == "[test]\n1 failed\n[build]\n1 passed"


def test_agents_files_are_no_output(tmp_path: Path):
    printed(tmp_path, "1 failed")
    printed(tmp_path / "agent", "all passed")
    printed(tmp_path / "steps/one/agent", "all passed")
    printed(tmp_path / "artifacts/logs/artifacts/steps/one", "all passed")
    assert verifier_output(tmp_path) == "1 failed"


def test_long_output_keeps_beginning_and_end(tmp_path: Path):
    printed(tmp_path, "first" + "x" * 3_000_000 + "last")
    kept = verifier_output(tmp_path)
    assert kept.startswith("first") and kept.endswith("last") and len(kept) < HEAD_CHARS + TAIL_CHARS + 60


def test_secret_in_output_is_redacted(tmp_path: Path):
    printed(tmp_path, "key sk-12345")
    assert verifier_output(tmp_path, secret="sk-12345") == "key [REDACTED]"


def test_short_secret_stays_in_numbers(tmp_path: Path):
    printed(tmp_path, "11 of 12 passed")
    assert verifier_output(tmp_path, secret="1") == "11 of 12 passed"


def test_links_and_pipes_are_not_read(tmp_path: Path):
    (tmp_path / "secret").write_text("the host's")
    for name in ("one", "two"):
        (tmp_path / "trial/steps" / name / "verifier").mkdir(parents=True)
    (tmp_path / "trial/steps/one/verifier/test-stdout.txt").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "trial/steps/two/verifier/test-stdout.txt")
    assert verifier_output(tmp_path / "trial", steps=["one", "two"]) == ""
