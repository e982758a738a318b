"""Logs of a run stay under a size limit while their writers go on."""

from pathlib import Path

from harbortrainer.runs.log_files import trim_logs


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
