"""What Terminus-2 shows the model, as text, without running a trial.

The prompt template is Harbor's own file; the sentences around a terminal's screen are those of `terminus_2.py` and
`tmux_session.py`. Invariant: for commands that print nothing, the messages equal those of a real trial in a shell whose
prompt is `$ `, character by character (a test compares them).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

PANE_HEIGHT = 40
PROMPT = "$"
DURATION = 0.1
"""Seconds a command is given: what Terminus-2's own prompt advises for one that ends at once."""

type Pace = Literal["ready", "late"]
"""Whether the shell had printed its prompt when the screen was read: a race that both sides win at times."""


@dataclass(frozen=True)
class Transcript:
    """One episode: `turns` are (what the model is shown, what it should answer), in order."""

    task_key: str
    turns: tuple[tuple[str, str], ...]


@cache
def template() -> str:
    """Terminus-2's first prompt, with `{instruction}` and `{terminal_state}` to fill in."""
    return files("harbor").joinpath("agents/terminus_2/templates/terminus-json-plain.txt").read_text()


def first_prompt(instruction: str, pace: Pace = "ready") -> str:
    """The first message of a trial."""
    screen = _screen([PROMPT] if pace == "ready" else [])
    return template().format(instruction=instruction, terminal_state=f"Current Terminal Screen:\n{screen}")


def confirmation_prompt(commands: Sequence[str], pace: Pace = "ready") -> str:
    """What comes after the first `task_complete`; `pace` tells whether the last command had ended by then."""
    lines = [f"{PROMPT} {command}" for command in commands] + ([PROMPT] if pace == "ready" else [])
    return (
        f"Current terminal state:\nNew Terminal Output:\n{_screen(lines)}\n\n"
        "Are you sure you want to mark the task as complete? This will trigger your solution to be graded and you "
        'won\'t be able to make any further corrections. If so, include "task_complete": true in your JSON response '
        "again."
    )


def answer(keystrokes: Sequence[str], *, duration: float = DURATION, complete: bool = True) -> str:
    """The model's answer that types `keystrokes` and says whether the task is complete."""
    return json.dumps(
        {
            "analysis": "",
            "plan": "",
            "commands": [{"keystrokes": keys, "duration": duration} for keys in keystrokes],
            "task_complete": complete,
        }
    )


def solved(commands: Sequence[str]) -> str:
    """The answer that runs `commands`, one line each, and says that the task is complete."""
    return answer([f"{command}\n" for command in commands])


CONFIRMED = answer([])
"""The answer that says so again."""


def transcript(
    task_key: str, instruction: str, commands: Sequence[str], paces: tuple[Pace, Pace] = ("ready", "ready")
) -> Transcript:
    """An episode that runs `commands` in its first turn and confirms in its second."""
    first = (first_prompt(instruction, paces[0]), solved(commands))
    return Transcript(task_key, (first, (confirmation_prompt(commands, paces[1]), CONFIRMED)))


def _screen(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n" * (PANE_HEIGHT - max(len(lines), 1) + 1)
