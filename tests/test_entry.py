"""Ctrl-C while the program loads."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SLOW_IMPORT = "import time\nprint('loading', flush=True)\ntime.sleep(60)\n"


def test_interrupt_during_imports_ends_without_a_stack_trace(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(SLOW_IMPORT)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, name = scripts["harbortrainer"].split(":")
    command = [sys.executable, "-c", f"import sys; from {module} import {name}; sys.exit({name}())", "--version"]
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    try:
        assert program.stdout is not None and program.stdout.readline() == "loading\n"
        program.send_signal(signal.SIGINT)
        assert program.communicate(timeout=20) == ("", "")
        assert program.returncode == 130
    finally:
        program.kill()
        program.communicate()
