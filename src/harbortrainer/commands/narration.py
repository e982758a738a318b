"""One trial as text for a terminal. What a model wrote, or had a terminal show, is hostile: no control character of it
reaches the user's own terminal."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from harbortrainer.trials.record import TrialRecord

TERMINAL = "Current terminal state:"
"""Stands before the terminal in Terminus-2's first prompt, behind all that is the same in every trial."""

LAST_LINES = 10


class Narration:
    """Prints every turn as it comes.

    Args:
        tell: Prints a line.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._turn = tell, 0

    def shown(self, text: str) -> None:
        """What the terminal shows."""
        self._part("terminal", text.rpartition(TERMINAL)[2])

    def said(self, thinking: str | None, answer: str) -> None:
        """What the model says: its thinking, and its answer taken apart where it can be."""
        self._turn += 1
        if thinking:
            self._part(f"turn {self._turn}, thinking", thinking)
        self._part(f"turn {self._turn}, model", in_words(answer))

    def _part(self, title: str, text: str) -> None:
        self._tell(f"--- {title}")
        self._tell(re.sub(r"\n{3,}", "\n\n", printable(text.strip())))  # a terminal is mostly empty


def printable(text: str) -> str:
    """The text with escapes in place of what would command a terminal.

    Example:
        >>> printable("a\\x1b[2J\\tb")
        'a\\\\x1b[2J\\tb'
    """
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text)


def in_words(answer: str) -> str:
    """An answer of Terminus-2's for people: analysis, plan, what is typed; as it is where it is something else."""
    try:
        told = json.loads(answer)
        typed = [f"$ {command['keystrokes']!r}" for command in told["commands"]]
        lines = [*(str(told[key]) for key in ("analysis", "plan") if told.get(key)), *typed]
    except (ValueError, KeyError, TypeError):
        return answer
    return "\n".join([*lines, *(["says that the task is complete"] if told.get("task_complete") is True else [])])


def the_end(record: TrialRecord) -> list[str]:
    """Outcome, reward, tokens and seconds of a trial, what the agent changed where the sandbox can tell, and why
    it failed if it did."""
    rewards = ", ".join(f"{name} {value:g}" for name, value in (record.rewards or {}).items())
    took = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in record.timings if value is not None)
    lines = [
        f"outcome   {record.outcome}",
        f"reward    {'none' if record.reward is None else f'{record.reward:g}'}{f'   ({rewards})' if rewards else ''}",
        f"turns     {record.turns}, {record.parse_errors} answers could not be read",
        f"tokens    {record.tokens.prompt} of prompts, {record.tokens.completion} sampled",
        f"seconds   {took}",
        *(f"step      {step.name}: {step.outcome} {step.rewards or ''}" for step in record.steps),
    ]
    if record.error is not None:
        lines.append(f"error     {record.error.type}: {printable(record.error.message)}")
    for file in record.changed_files or ():
        lines.append(f"{file.how:<9} {printable(file.path)} ({file.size} bytes)")
    if (more := record.changed_files_total - len(record.changed_files or ())) > 0:
        lines.append(f"          and {more} more files")
    if record.evidence:
        lines.append(f"evidence  {printable(record.evidence)}")
    return lines


def printed_by(record: TrialRecord, name: str) -> list[str]:
    """The last lines of a file of the trial: what the oracle's solution or the verifier printed."""
    files = sorted(Path(record.trial_dir).rglob(name)) if record.trial_dir else []
    lines = [line.rstrip() for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return [printable(line) for line in lines[-LAST_LINES:]]
