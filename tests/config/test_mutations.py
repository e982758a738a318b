"""Mutated run files and overrides: success, or error lines with exit code 2; never a traceback.

A sample of the 1 000 cases always runs; `--all-mutations` (`make test-long`) runs all.
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
pytestmark = pytest.mark.process


@pytest.fixture
def project_folder(tmp_path, monkeypatch):
    """Return a folder with a link to `datasets`, as the current folder; machine checks are disabled."""
    monkeypatch.chdir(tmp_path)
    Path("datasets").symlink_to(Path(__file__).parents[2] / "datasets")
    monkeypatch.setattr(launch, "examine_machine", lambda plan: [])
    monkeypatch.setattr(prime_rl_start, "start", lambda *args, **kwargs: 0)
    return tmp_path


def run_command(arguments: list[str]) -> tuple[int, list[str]]:
    """Run a command and return its exit code and stderr lines."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(arguments)
    return code, [line for line in stderr.getvalue().splitlines() if not line.startswith("loading ")]


@pytest.mark.parametrize("engine", ["local", "prime-rl"])
def test_broken_run_file_gives_error_lines(project_folder, request, engine):
    stride = 1 if request.config.getoption("--all-mutations") else CASES // SAMPLE
    codes = []
    for number in range(0, CASES, stride):
        mutation = case(number)
        (project_folder / "run.toml").write_text(mutation.text, encoding="utf-8")
        try:
            code, lines = run_command(
                ["train", "--config", "run.toml", "--engine", engine, "--dry-run", *mutation.words]
            )
        except BaseException as error:
            raise AssertionError(f"case {number} {mutation.words}") from error
        codes.append(code)
        assert code == (2 if lines else 0), (number, mutation.words, code, lines)
        assert all(line.startswith("error: ") for line in lines) and len(set(lines)) == len(lines), (number, lines)
        assert sorted(path.name for path in project_folder.iterdir()) == ["datasets", "run.toml"], (
            f"case {number} wrote"
        )
    assert 0 < codes.count(0) < len(codes), "some cases must succeed and some fail"
