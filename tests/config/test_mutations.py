"""Whatever stands in a run file or on the command line: success, or one line and exit code 2; never a traceback.

A sample of the thousand cases runs always; all of them with `--all-mutations`, which `make test-long` sets.
"""

import contextlib
import io
from pathlib import Path

import pytest
from run_file_mutations import case

from harbortrainer import cli
from harbortrainer.commands import launch
from harbortrainer.engines.prime_rl import start as prime_rl_start

CASES, SAMPLE = 1000, 60


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder in which the shipped files find their tasks; what asks the machine is left out."""
    monkeypatch.chdir(tmp_path)
    for name in ("datasets",):
        Path(name).symlink_to(Path(__file__).parents[2] / name)
    monkeypatch.setattr(launch, "examine_machine", lambda plan: [])
    monkeypatch.setattr(prime_rl_start, "start", lambda *args, **kwargs: 0)
    return tmp_path


def told(words: list[str]) -> tuple[int, list[str]]:
    """The exit code of a command, and what it said on stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(words)
    return code, [line for line in said.getvalue().splitlines() if not line.startswith("loading ")]


@pytest.mark.parametrize("engine", ["local", "prime-rl"])
def test_a_broken_run_file_is_told_in_one_line(workplace, request, engine):
    share = 1 if request.config.getoption("--all-mutations") else CASES // SAMPLE
    codes = []
    for number in range(0, CASES, share):
        this = case(number)
        (workplace / "run.toml").write_text(this.text, encoding="utf-8")
        try:
            code, lines = told(["train", "--config", "run.toml", "--engine", engine, "--dry-run", *this.words])
        except BaseException as error:
            raise AssertionError(f"case {number} {this.words}") from error
        codes.append(code)
        assert (code, len(lines)) in ((0, 0), (2, 1)), (number, this.words, lines)
        assert not lines or lines[0].startswith("error: "), (number, lines)
        assert sorted(path.name for path in workplace.iterdir()) == ["datasets", "run.toml"], f"case {number} wrote"
    assert 0 < codes.count(0) < len(codes), "some are fine, and some are not"
