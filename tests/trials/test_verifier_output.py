"""What is kept of what a verifier printed; an agent can write where the verifier writes."""

import os
from pathlib import Path

from harbortrainer.trials.verifier_output import FIRST, LAST, verifier_output


def printed(folder: Path, text: str) -> Path:
    (folder / "verifier").mkdir(parents=True)
    file = folder / "verifier" / "test-stdout.txt"
    file.write_text(text)
    return file


def test_of_each_step_what_was_printed(tmp_path: Path):
    printed(tmp_path / "steps/one", "1 passed\n")
    printed(tmp_path / "steps/two", "1 failed\n")
    assert verifier_output(tmp_path) == "[one]\n1 passed\n[two]\n1 failed"


def test_beginning_and_end_of_a_long_one(tmp_path: Path):
    printed(tmp_path, "first" + "x" * 3_000_000 + "last")
    kept = verifier_output(tmp_path)
    assert kept.startswith("first") and kept.endswith("last") and len(kept) < FIRST + LAST + 60


def test_a_secret_is_not_kept(tmp_path: Path):
    printed(tmp_path, "key sk-123")
    assert verifier_output(tmp_path, secret="sk-123") == "key [REDACTED]"


def test_no_link_is_followed_and_no_pipe_waited_on(tmp_path: Path):
    (tmp_path / "secret").write_text("the host's")
    for name in ("one", "two"):
        (tmp_path / "trial" / name / "verifier").mkdir(parents=True)
    (tmp_path / "trial/one/verifier/test-stdout.txt").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "trial/two/verifier/test-stdout.txt")
    assert verifier_output(tmp_path / "trial") == ""
