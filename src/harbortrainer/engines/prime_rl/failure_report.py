"""Reports of failed and stalled runs: the failed child, its exit code, its log and its last lines.

`rl` writes the log of each child to `<run>/logs/latest/` and reports which child failed.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from harbortrainer.engines.prime_rl.stall_detector import Stall
from harbortrainer.runs.log_files import COLOUR, last_lines

LINES = 20
CHILD = r"trainer|orchestrator|inference|(?:train|eval) env server .+?"
FAILED = re.compile(rf"\b(?P<name>{CHILD}) failed with exit code (?P<code>-?\d+)", re.IGNORECASE)
"""What `rl` reports of a failed child (`monitor_process`). Its output also has the orchestrator's lines."""


def report(run_dir: Path, tail: Iterable[str], log: Path, code: int) -> str:
    """Return the text to print if `rl` failed.

    Args:
        run_dir: The run's folder.
        tail: The last lines of `rl`'s output.
        log: The file with all of its output.
        code: The exit code of `rl`.
    """
    lines = [COLOUR.sub("", line) for line in tail]
    child = child_that_failed(lines)
    if child is None:
        return "\n".join([f"rl ended with exit code {code}; its output is in {log}", *_indented(lines)])
    name = child["name"].lower()
    child_log = find_log(run_dir, name)
    heading = [f"{name} ended with exit code {child['code']}"]
    if child_log is None:
        return "\n".join([*heading, f"its output is in {log}", *_indented(lines)])
    return "\n".join([*heading, f"its log is {child_log}, the last lines:", *_indented(last_lines(child_log))])


def stall_report(found: Stall, log: Path, *, resumable: bool) -> str:
    """Return the text to print if a run was ended because it stalled; `log` has all output of `rl`."""
    restart = ", or use --restarts N" if found.restart_helps else ""
    resume = f"continue from the last checkpoint with --resume{restart}" if resumable else ""
    what = f"the run stalled and was ended: {found.what}"
    where = f"its log is {found.log}, the last lines:" if found.log else f"the output is in {log}"
    return "\n".join([what, where, *_indented(list(found.last_lines)), "; ".join(filter(None, (found.do, resume)))])


def child_that_failed(tail: Iterable[str]) -> re.Match[str] | None:
    """Return the match of the first child that `rl` reports as failed."""
    return next((match for line in tail for match in FAILED.finditer(COLOUR.sub("", line))), None)


def find_log(run_dir: Path, name: str) -> Path | None:
    """Return the log of a child of `rl`: "trainer", "orchestrator", "inference" or "<split> env server <name>"."""
    latest = run_dir / "logs" / "latest"
    server = re.fullmatch(r"(train|eval) env server (.+)", name)
    if server is None:
        path = latest / f"{name}.log"
        return path if path.is_file() else None
    folder = latest / "envs" / server[1]
    found = [path for path in folder.glob("*.log") if path.stem.lower() == server[2]]
    return found[0] if found else None


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines[-LINES:]]
