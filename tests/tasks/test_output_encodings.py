"""In any locale, names and instructions are read as UTF-8, and signs that the output lacks are printed as escapes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_tasks import honest

pytestmark = pytest.mark.process

COMMAND = "import sys; from harbortrainer.cli import main; sys.exit(main())"
ENCODINGS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "C": {"LC_ALL": "C"},
    "C without UTF-8 mode": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_task_names_are_printed_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    honest(tmp_path / "tasks" / "tâche-タスク-🦄", "Faites /tmp/answer. 🦄")
    honest(tmp_path / "tasks" / "plain")
    (tmp_path / "tasks" / "plain" / "caf\udce9").write_text("")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}
    tasks, options = (
        str(tmp_path / "tasks"),
        ["--repeats", "1", "--cheats", "none", "--environment-kwarg", "image=host"],
    )
    for arguments, expected in ((["list", tasks], "BAD"), (["check", tasks, *options], "1 of 2 tasks are fit")):
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, "tasks", *arguments],
            env=variables | ENCODINGS[encoding],
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )
        output = (done.stdout + done.stderr).decode("latin-1")
        assert done.returncode == 1 and "Traceback" not in output, output[-3000:]
        assert expected in output and "not UTF-8" in output, output[-3000:]
        assert ("t\\xe2che" in output) == (encoding in ("ascii", "C without UTF-8 mode")), output[-3000:]
