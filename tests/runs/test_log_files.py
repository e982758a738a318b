"""Logs of a run stay under a size limit while their writers go on."""

from pathlib import Path

import pytest

from harbortrainer.runs.log_files import free_old_parts, trim_logs

pytestmark = pytest.mark.process


def test_log_over_the_limit_is_copied_and_emptied(tmp_path: Path):
    with (
        (tmp_path / "env_a.log").open("a", buffering=1) as log,
        (tmp_path / "env_b.log").open("a", buffering=1) as small,
    ):
        small.write("short\n")
        for line in ("first line\n", "second line\n"):
            log.write(line)
            trim_logs(tmp_path, most=8)
        log.write("third\n")
        trim_logs(tmp_path, most=8)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "env_a.log": "third\n",
        "env_a.log.1": "second line\n",
        "env_b.log": "short\n",
    }


def test_log_that_cannot_be_copied_keeps_its_lines(tmp_path: Path):
    (tmp_path / "env_a.log").write_text("first line\n")
    (tmp_path / "env_a.log.1").mkdir()
    trim_logs(tmp_path, most=8)
    assert (tmp_path / "env_a.log").read_text() == "first line\n"


def test_old_part_of_a_log_is_freed_while_its_writer_goes_on(tmp_path: Path):
    log = tmp_path / "attempt_1" / "envs" / "s.log"
    log.parent.mkdir(parents=True)
    with log.open("wb", buffering=0) as writer:  # not for appending, as Prime-RL opens it
        writer.write(b"old\n" * 250_000)
        before = log.stat().st_blocks
        free_old_parts(tmp_path, most=100_000)
        if log.stat().st_blocks == before:
            pytest.skip("a file system without holes")
        writer.write(b"new\n")
    content = log.read_bytes()
    assert (len(content), content[:4], content[-100_004:]) == (1_000_004, bytes(4), b"old\n" * 25_000 + b"new\n")
    assert log.stat().st_blocks * 512 < 120_000
    size = log.stat().st_blocks
    free_old_parts(tmp_path, most=100_000)
    assert log.stat().st_blocks == size
