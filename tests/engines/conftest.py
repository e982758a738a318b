"""Fixtures: a run file for Prime-RL, and a script in place of its `rl` program."""

import sys
from pathlib import Path

import pytest

from harbortrainer.engines.prime_rl import checkout
from harbortrainer.engines.prime_rl.checkout import Checkout

SAMPLES = Path(__file__).parents[2] / "datasets" / "harbor_tasks"
RUN_FILE = """
output_dir = "{outputs}"
{more}
[run]
name = "r"
[trainer.model.lora]
[orchestrator]
batch_size = 8
group_size = 4
[[orchestrator.train.source]]
env = {{ taskset = {{ id = "harbor_env", tasks_dir = "{tasks}" }} }}
"""


@pytest.fixture
def run_file(tmp_path):
    """Write a run file, with additional top-level text, and return its path."""

    def write(more: str = "", tasks: Path = SAMPLES) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(RUN_FILE.format(outputs=tmp_path / "outputs", more=more, tasks=tasks))
        return path

    return write


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Make a checkout of Prime-RL whose `rl` runs the given code; it is started directly, without uv."""
    monkeypatch.setattr(checkout, "find_uv", lambda: None)

    def make(code: str) -> Checkout:
        root = tmp_path / "prime-rl"
        (root / ".venv" / "bin").mkdir(parents=True)
        (root / "pyproject.toml").write_text("")
        program = root / ".venv" / "bin" / "rl"
        program.write_text(f"#!{sys.executable}\n{code}\n")
        program.chmod(0o755)
        return Checkout(root)

    return make
