"""Validation of `[warmup]`."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from harbortrainer.config.run_sections import WarmupConfig


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
    ],
)
def test_refuses_invalid_warmup_settings(keys: dict):
    with pytest.raises(ValidationError):
        WarmupConfig.model_validate(keys)


def test_reading_the_config_does_not_import_torch():
    code = "import sys, harbortrainer.config.run_sections, harbortrainer.warmup; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
