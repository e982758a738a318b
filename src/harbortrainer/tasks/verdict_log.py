"""Log of the verdicts of all checks in a working directory, so that a later check can continue.

Invariants: a logged verdict survives `kill -9`. Several checks may run at once, such as the shards of a set.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue, ValidationError

from harbortrainer.runs.durable import append_line, read_lines, repair
from harbortrainer.runs.locks import waiting_lock
from harbortrainer.tasks.verdict import Verdict

VERDICTS_FILE = Path("outputs") / "verdicts.jsonl"
"""File of the log; relative to the working directory."""


@dataclass(frozen=True)
class VerdictLog:
    """The verdicts of checks with the same options."""

    options: Mapping[str, JsonValue]
    """Options on which a verdict depends."""

    def add(self, verdict: Verdict) -> None:
        """Append the verdict if it is decided."""
        if verdict.is_decided:
            with waiting_lock(VERDICTS_FILE.with_name(f".{VERDICTS_FILE.name}.lock")):
                repair(VERDICTS_FILE) if _is_torn() else None
                append_line(VERDICTS_FILE, {"options": self.options, "verdict": verdict.model_dump(mode="json")})

    def read(self) -> dict[tuple[str, str], Verdict]:
        """Return the newest verdict by task key and type of environment."""
        known = {}
        for row in read_lines(VERDICTS_FILE):
            try:
                if row["options"] == self.options:
                    verdict = Verdict.model_validate(row["verdict"])
                    known[verdict.key, verdict.environment] = verdict
            except (KeyError, ValidationError):  # of another version
                continue
        return known


def _is_torn() -> bool:
    """Whether the log's last line is incomplete."""
    try:
        with VERDICTS_FILE.open("rb") as file:
            return file.seek(0, 2) > 0 and file.seek(-1, 2) >= 0 and file.read(1) != b"\n"
    except FileNotFoundError:
        return False
