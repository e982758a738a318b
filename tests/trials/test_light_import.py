"""The plugin is imported in three processes; what it imports of this package must stay light."""

import subprocess
import sys

import pytest

HEAVY = ("harbor", "litellm", "httpx", "openai", "torch")


@pytest.mark.parametrize("module", ["trials", "trials.hooks", "config.environment_table", "sandbox.environment_types"])
def test_importing_module_imports_neither_harbor_nor_litellm(module: str):
    code = f"import harbortrainer.{module}, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
