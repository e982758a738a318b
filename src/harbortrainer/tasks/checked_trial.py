"""One trial of a task's check: rewards, the last lines of solution and verifier, and the part that a failure blames.

Invariant: the text of a trial's files is untrusted and bounded; only the last `_MAX_READ` bytes of a log are read.
"""

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from harbortrainer.sandbox.build_log import whole_end
from harbortrainer.trials.harbor_result import summarize_in_one_line
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import Timings, TrialRecord

type Category = Literal["task", "solution", "verifier", "build", "network", "host", "unsupported"]
"""The part that has to change: the task's files, its solution, its verifier, its image, access to the network, this
machine's software or settings, or the environment type."""

LAST_LINES = 3
"""Lines of an output that are shown with an unexpected reward."""
_MAX_READ, _MAX_SHOWN = 1 << 16, 400

_NETWORK_ERROR = re.compile(
    "|".join(
        (
            r"Temporary failure (?:in name )?resol",
            r"Could not resolve",
            r"Name or service not known",
            r"Network is unreachable",
            r"Failed to establish a new connection",
            r"Failed to connect to (?!localhost|127\.)",
            r"Could not connect to (?!localhost|127\.)",
            r"no such host|ENOTFOUND|EAI_AGAIN|ERR_CONNECTION",
            r"dns error|TLS handshake timeout|certificate verify failed",
            r"dial tcp [^\n]*(?:i/o timeout|connection refused)",
            r"toomanyrequests",
        )
    )
)
"""An address that cannot be reached, in the words of libc, curl, apt, pip, npm, Go and Docker."""
_NOT_INSTALLED = re.compile(rf"command not found|: not found$|No module named|{_NETWORK_ERROR.pattern}")
_HOST_ERROR = re.compile(
    r"Docker daemon|docker\.sock|address pools|unknown flag: --|unknown command: docker|"
    r"No space left on device|Cannot allocate memory|Too many open files"
)
_BUILD_ERRORS = ("SandboxBuildError", "EnvironmentBuildTimeoutError", "ImageLacksError")
_UNBUILT = re.compile(r"the image cannot be built|failed to solve|pull access denied|manifest unknown")


class CheckedTrial(BaseModel):
    """One trial of a check."""

    agent: str
    """`oracle`, `nop`, or the name of a cheat."""
    outcome: Outcome
    rewards: dict[str, float] = Field(default_factory=dict)
    """The verifier's rewards by name."""
    reward_key: str | None = None
    """The name of `reward` among them, where one is set."""
    reward: float | None
    """None when the outcome does not train."""
    seconds: Timings
    failure: str = ""
    """The error of a trial that did not complete."""
    blame: Category | None = None
    """The part that has to change for the trial to complete; None if it completed."""
    solution_exit: int | None = None
    """Exit code of the oracle's solution, of a multi-step task's last failed one; None for other agents."""
    solution_words: str = ""
    """Last lines of the solution's output."""
    last_words: str = ""
    """Last lines of the verifier's output."""
    network_error: str = ""
    """Line of the solution's or the verifier's output that names an address that was not reached."""
    verifier_lacks: str = ""
    """Line of the verifier's output that names missing software, or an address that was not reached."""

    @property
    def words(self) -> str:
        """The last lines of solution and verifier, in parentheses."""
        if self.solution_exit is None:
            solution = ""
        elif self.solution_words:
            solution = (
                f" (the solution ended with exit code {self.solution_exit}, its last lines: {self.solution_words})"
            )
        else:
            solution = f" (the solution ended with exit code {self.solution_exit} and no output)"
        return solution + (f" (the verifier's last lines: {self.last_words})" if self.last_words else "")


def checked_trial(agent: str, record: TrialRecord, closed: Collection[str] = ()) -> CheckedTrial:
    """Summarize a trial; its folder must still exist, since the logs are read from it.

    Args:
        agent: `oracle`, `nop`, or the name of a cheat.
        record: The trial.
        closed: Those of `agent` and `verifier` that the task gives no network; their failed connections are its fault.
    """
    folder = Path(record.trial_dir) if record.trial_dir else None
    solution, verifier = _lines(folder, "oracle.txt"), _lines(folder, "test-stdout.txt")
    error = "" if record.error is None else record.error.message
    outputs = [error.split("\n"), [] if "agent" in closed else solution, [] if "verifier" in closed else verifier]
    network = next((line for lines in outputs for line in lines if _NETWORK_ERROR.search(line)), "")
    failed = record.outcome is not Outcome.completed
    ending = f"ended as {record.outcome}{f' ({summarize_in_one_line(error)})' if record.error else ''}"
    return CheckedTrial(
        agent=agent,
        outcome=record.outcome,
        rewards=record.rewards or {},
        reward_key=record.reward_key,
        reward=record.reward,
        seconds=record.timings,
        failure=ending if failed else "",
        blame=_blame(record, bool(network)) if failed else None,
        solution_exit=_exit_code(folder) if agent == "oracle" and record.timings.agent_execution is not None else None,
        solution_words=_shown(solution),
        last_words=_shown(verifier),
        network_error=network[:_MAX_SHOWN],
        verifier_lacks=next(filter(_NOT_INSTALLED.search, verifier), "")[:_MAX_SHOWN],
    )


def _blame(record: TrialRecord, network: bool) -> Category:
    """Return the part that has to change for a trial to complete.

    Args:
        record: The trial.
        network: Whether an address was not reached.
    """
    kind, message = (record.error.type, record.error.message) if record.error else ("", "")
    if network:
        return "network"
    if _HOST_ERROR.search(message):
        return "host"
    if kind == "HealthcheckError":
        return "task"
    if kind in _BUILD_ERRORS or _UNBUILT.search(message):
        return "build"
    if record.outcome in (Outcome.verifier_error, Outcome.tampered):
        return "verifier"
    return "host" if record.outcome in (Outcome.sandbox_error, Outcome.cancelled) else "solution"


def _logs(folder: Path | None, name: str) -> list[Path]:
    """Return the files of that name in a trial's folder; several for a multi-step task."""
    found = sorted(folder.rglob(name)) if folder is not None else []
    return [file for file in found if file.is_file() and not file.is_symlink()]


def _lines(folder: Path | None, name: str) -> list[str]:
    """Return the last lines of a log that are not blank."""
    return [line.strip() for file in _logs(folder, name) for line in _tail(file) if line.strip()]


def _tail(file: Path) -> Iterator[str]:
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - _MAX_READ))
        yield from opened.read(_MAX_READ).decode(errors="replace").split("\n")


def _shown(lines: list[str]) -> str:
    return whole_end("\n".join(lines[-LAST_LINES:]), _MAX_SHOWN - 2 * LAST_LINES).replace("\n", " | ")


def _exit_code(folder: Path | None) -> int:
    """Return the exit code of a solution; Harbor writes a file for one that is not 0."""
    codes = [
        text
        for file in _logs(folder, "exit-code.txt")
        if re.fullmatch(r"-?\d{1,9}", text := file.read_text(errors="replace").strip())
    ]
    return int(codes[-1]) if codes else 0
