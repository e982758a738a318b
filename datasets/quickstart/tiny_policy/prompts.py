"""The messages that Terminus-2 sends to the model, written without a trial.

The prompt template is Harbor's own file; the sentences around a terminal's screen come from `terminus_2.py` and
`tmux_session.py`. Invariant: for commands that print nothing, the messages equal a real trial's in a shell whose prompt
is `$ `, character by character (a test compares them).
"""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Literal

from harbortrainer.warmup.demonstrations import CONFIRMED, Demonstration, answer

WRITTEN_FOR = "harbor 0.21.0 and 0.24.0"
TEMPLATE = "agents/terminus_2/templates/terminus-json-plain.txt"
"""Harbor's own file, in its package."""
PANE_HEIGHT = 40
PROMPT = "$"

type Pace = Literal["ready", "late"]
"""Whether the shell had printed its prompt when the screen was read. In real trials both occur."""


@cache
def template() -> str:
    """Return Terminus-2's first prompt, with the placeholders `{instruction}` and `{terminal_state}`."""
    return files("harbor").joinpath(TEMPLATE).read_text()


def first_prompt(instruction: str, pace: Pace = "ready") -> str:
    """Return the first message of a trial."""
    screen = _screen([PROMPT] if pace == "ready" else [])
    return template().format(instruction=instruction, terminal_state=f"Current Terminal Screen:\n{screen}")


def confirmation_prompt(commands: Sequence[str], pace: Pace = "ready") -> str:
    """Return the message after the first `task_complete`; `pace` is whether the last command had ended."""
    lines = [f"{PROMPT} {command}" for command in commands] + ([PROMPT] if pace == "ready" else [])
    return (
        f"Current terminal state:\nNew Terminal Output:\n{_screen(lines)}\n\n"
        "Are you sure you want to mark the task as complete? This will trigger your solution to be graded and you "
        'won\'t be able to make any further corrections. If so, include "task_complete": true in your JSON response '
        "again."
    )


def solved(commands: Sequence[str]) -> str:
    """Return the answer that runs `commands`, one line each, and marks the task as complete."""
    return answer([f"{command}\n" for command in commands])


def episode(instruction: str, commands: Sequence[str], paces: tuple[Pace, Pace] = ("ready", "ready")) -> Demonstration:
    """Return the demonstration that runs `commands` in its first turn and confirms in its second."""
    first = (first_prompt(instruction, paces[0]), solved(commands))
    return (first, (confirmation_prompt(commands, paces[1]), CONFIRMED))


def _screen(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n" * (PANE_HEIGHT - max(len(lines), 1) + 1)
