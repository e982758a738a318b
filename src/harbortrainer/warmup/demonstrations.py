"""Demonstrations: episodes as text, with Terminus-2's prompts and the answers to learn, in Terminus-2's JSON."""

import json
from collections.abc import Sequence

DURATION = 0.1
"""Seconds to wait for a command; Terminus-2's prompt advises this for one that ends at once."""

type Demonstration = tuple[tuple[str, str], ...]
"""One episode: pairs of prompt and answer, turn by turn."""


def answer(keystrokes: Sequence[str], *, duration: float = DURATION, complete: bool = True) -> str:
    """Return the answer that types `keystrokes` and reports whether the task is complete."""
    return json.dumps(
        {
            "analysis": "",
            "plan": "",
            "commands": [{"keystrokes": keys, "duration": duration} for keys in keystrokes],
            "task_complete": complete,
        }
    )


CONFIRMED = answer([])
"""The answer that confirms that the task is complete."""
