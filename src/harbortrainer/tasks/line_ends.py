"""Shell scripts of a task whose lines end as Windows ends them: no shell of Linux runs them as they were meant.

`/bin/bash\\r` is no interpreter and `then\\r` no word, and what is printed ("cannot execute: required file not found")
does not say so. Contract: a shell script is what its name or its first line calls one, in a folder of which something
gets into a sandbox; the first line stands for all of them.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from harbortrainer.config.table import TomlTable

_PLACES = ("environment", "solution", "tests", "steps")
_CALLED_SHELL = re.compile(rb"^#!.*\b(?:ba|da|k|z)?sh\b")
_MOST_READ = 1000
_MOST_NAMED = 3


def windows_scripts(task: Path, config: TomlTable) -> list[str]:
    """Those below a task's folder, as paths within it; none of a task that Windows runs.

    Args:
        task: The folder.
        config: Its task.toml.
    """
    environment = config.get("environment")
    if isinstance(environment, dict) and environment.get("os") == "windows":
        return []
    return [str(file.relative_to(task)) for file in sorted(_files(task)) if _is_windows(file)]


def told(scripts: list[str]) -> str:
    """What is said of them."""
    more = f" and {len(scripts) - _MOST_NAMED} more" if len(scripts) > _MOST_NAMED else ""
    names = ", ".join(scripts[:_MOST_NAMED]) + more
    return f"Windows line ends, on which Linux's shells fail, in {names}: take them away (sed -i 's/\\r$//' FILE)"


def _files(task: Path) -> Iterator[Path]:
    for name in _PLACES:
        yield from (task / name).rglob("*")


def _is_windows(file: Path) -> bool:
    if file.is_symlink() or not file.is_file():
        return False
    with file.open("rb") as opened:
        line = opened.readline(_MOST_READ)
    return line.endswith(b"\r\n") and (file.suffix == ".sh" or _CALLED_SHELL.search(line) is not None)
