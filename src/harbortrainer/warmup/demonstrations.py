"""Episodes as text: what Terminus-2 shows a model, and what the model should answer, in Terminus-2's JSON."""

import json
from collections.abc import Sequence

DURATION = 0.1
"""Seconds a command is given: what Terminus-2's own prompt advises for one that ends at once."""

type Demonstration = tuple[tuple[str, str], ...]
"""One episode: (what the model is shown, what it should answer), turn by turn."""


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


CONFIRMED = answer([])
"""The answer that says so again."""
