"""What Terminus-2 shows the model, as text, without running a trial.

The prompt template is Harbor's own file; the sentences around a terminal's screen are those of `terminus_2.py` and
`tmux_session.py`. Invariant: for a command that prints nothing, the messages equal those of a real trial, character by
character (a test compares them).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

PANE_HEIGHT = 40
PROMPT = "$"
DURATION = 0.1
"""Seconds a command is given: what Terminus-2's own prompt advises for one that ends at once."""


@dataclass(frozen=True)
class Transcript:
    """One episode: `turns` are (what the model is shown, what it should answer), in order."""

    task_key: str
    turns: tuple[tuple[str, str], ...]


@cache
def template() -> str:
    """Terminus-2's first prompt, with `{instruction}` and `{terminal_state}` to fill in."""
    return files("harbor").joinpath("agents/terminus_2/templates/terminus-json-plain.txt").read_text()


def first_prompt(instruction: str, *, ready: bool = True) -> str:
    """The first message of a trial; `ready` says whether the shell had printed its prompt by then."""
    screen = "Current Terminal Screen:\n" + _screen([PROMPT] if ready else [])
    return template().format(instruction=instruction, terminal_state=screen)


def confirmation_prompt(commands: Sequence[str], *, ready: bool = True) -> str:
    """What comes after the first `task_complete`; `ready` says whether the last command had ended by then."""
    lines = [f"{PROMPT} {command}" for command in commands] + ([PROMPT] if ready else [])
    return (
        f"Current terminal state:\nNew Terminal Output:\n{_screen(lines)}\n\n"
        "Are you sure you want to mark the task as complete? This will trigger your solution to be graded and you "
        'won\'t be able to make any further corrections. If so, include "task_complete": true in your JSON response '
        "again."
    )


def answer(commands: Sequence[str]) -> str:
    """The model's answer that runs `commands` and says that the task is complete."""
    return json.dumps(
        {
            "analysis": "",
            "plan": "",
            "commands": [{"keystrokes": f"{command}\n", "duration": DURATION} for command in commands],
            "task_complete": True,
        }
    )


def transcript(task_key: str, instruction: str, commands: Sequence[str], *, ready: bool = True) -> Transcript:
    """An episode that runs `commands` in its first turn and confirms in its second."""
    first = (first_prompt(instruction, ready=ready), answer(commands))
    return Transcript(task_key, (first, (confirmation_prompt(commands), answer([]))))


def _screen(lines: list[str]) -> str:
    return "\n".join(lines) + "\n" * (PANE_HEIGHT - max(len(lines), 1) + 1)
