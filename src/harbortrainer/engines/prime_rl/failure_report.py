"""What a failed run left in its logs: which child died, with what code, and its last lines.

`rl` writes the log of each of its children to `<run>/logs/latest/` and says which one failed.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from harbortrainer.engines.prime_rl.standstill import Standstill

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
    child = child_that_failed(lines)
    if child is None:
        return "\n".join([f"rl ended with exit code {code}; all of its output is in {log}", *_indented(lines)])
    name = child["name"].split("Error:")[-1].strip().lower()
    child_log = find_log(run_dir, name)
    said = [f"{name} ended with exit code {child['code']}"]
    if child_log is None:
        return "\n".join([*said, f"all of its output is in {log}", *_indented(lines)])
    return "\n".join([*said, f"its log is {child_log}, the last lines:", *_indented(last_lines(child_log))])


def standstill_report(found: Standstill, log: Path, *, resumable: bool) -> str:
    """The text to print when a run was ended because it stood still; `log` holds all that `rl` wrote."""
    go_on = "go on from the last checkpoint with --resume, or let --restarts N do it" if resumable else ""
    what = f"the run stood still and was ended: {found.what}"
    where = f"its log is {found.log}, the last lines:" if found.log else f"all of the output is in {log}"
    return "\n".join([what, where, *_indented(list(found.last_lines)), "; ".join(filter(None, (found.do, go_on)))])


def child_that_failed(tail: Iterable[str]) -> re.Match[str] | None:
    """The first child that `rl` says has failed."""
    return next((match for line in tail for match in FAILED.finditer(COLOUR.sub("", line))), None)


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


def last_lines(path: Path) -> list[str]:
    """The end of a log, without colours."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return [COLOUR.sub("", line) for line in text.splitlines()[-LINES:]]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines[-LINES:]]
