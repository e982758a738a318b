"""The plugin is imported in three processes; what it imports of this package must stay light."""

import subprocess
import sys

HEAVY = ("harbor", "litellm", "httpx", "openai")


def test_importing_trials_imports_neither_harbor_nor_litellm():
    code = f"import harbortrainer.trials, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
