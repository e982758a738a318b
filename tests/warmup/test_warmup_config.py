"""Validation of `[warmup]`."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from harbortrainer.config.reader import load
from harbortrainer.config.run_sections import WarmupConfig
from harbortrainer.errors import UserError


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"family": "a.py", "tasks": "b"},
        {"family": "a.py", "success": (0.4, 0.2)},
        {"family": "a.py", "success": (0.0, 0.2)},
        {"family": "a.py", "lora_rank": 8},
        {"tasks": "b", "model": "a", "heldout": "c"},
        {"tasks": "b"},
        {"family": "a.py", "unknown": 1},
        {"family": "a.py", "target": 0.3},
        {"tasks": "b", "model": "a", "target": 0.3, "trials": 0},
        {"tasks": "b", "model": "a", "agent": "codex"},
    ],
)
def test_refuses_invalid_warmup_settings(keys: dict):
    with pytest.raises(ValidationError):
        WarmupConfig.model_validate(keys)


def test_refuses_to_teach_another_agent_than_the_run_trains(tmp_path: Path):
    text = (Path(__file__).parents[2] / "configs" / "laptop.toml").read_text()
    (file := tmp_path / "run.toml").write_text(text.replace('agent = "plain"           #', "#"))
    with pytest.raises(UserError, match=r"warmup\.agent: .*another agent than the run trains; set it to 'plain'"):
        load(file)


def test_reading_the_config_does_not_import_torch():
    code = "import sys, harbortrainer.config.run_sections, harbortrainer.warmup; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
