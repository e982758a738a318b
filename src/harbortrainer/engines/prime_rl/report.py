"""What a failed run left in its logs: which child died, with what code, and its last lines.

`rl` writes the log of each of its children to `<run>/logs/latest/` and says which one failed.
"""

import re
from collections.abc import Iterable
from pathlib import Path

LINES = 20
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
FAILED = re.compile(r"(?P<name>[A-Za-z][\w /.-]*?) failed with exit code (?P<code>-?\d+)")


def report(run_dir: Path, tail: Iterable[str], log: Path, code: int) -> str:
    """The text to print when `rl` came back with an error.

    Args:
        run_dir: The run's folder.
        tail: The last lines that `rl` wrote.
        log: The file all that `rl` wrote is in.
        code: The exit code of `rl`.
    """
    lines = [COLOUR.sub("", line) for line in tail]
    child = next((match for line in lines for match in FAILED.finditer(line)), None)
    if child is None:
        return "\n".join([f"rl ended with exit code {code}; all of its output is in {log}", *_indented(lines)])
    name = child["name"].split("Error:")[-1].strip().lower()
    child_log = find_log(run_dir, name)
    said = [f"{name} ended with exit code {child['code']}"]
    if child_log is None:
        return "\n".join([*said, f"all of its output is in {log}", *_indented(lines)])
    return "\n".join([*said, f"its log is {child_log}, the last lines:", *_indented(_last(child_log))])


def find_log(run_dir: Path, name: str) -> Path | None:
    """The log of a child of `rl`: "trainer", "orchestrator", "inference" or "<split> env server <name>"."""
    latest = run_dir / "logs" / "latest"
    server = re.fullmatch(r"(train|eval) env server (.+)", name)
    if server is None:
        path = latest / f"{name}.log"
        return path if path.is_file() else None
    folder = latest / "envs" / server[1]
    found = [path for path in folder.glob("*.log") if path.stem.lower() == server[2]]
    return found[0] if found else None


def _last(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return [COLOUR.sub("", line) for line in text.splitlines()[-LINES:]]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines[-LINES:]]
