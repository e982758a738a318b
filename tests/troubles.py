"""One task for each way in which a trial can end, and what the model answers in it.

What a task is about stands in its instruction (`This is about: out-of-time.`), so that one model server can play all of
them at once. docs/outcomes.md has the outcome of each.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fakes import DONE, keys, make_task
from scripted_engine import Answer, Script, by_turn

SUBJECT = "This is about: {}."
_SUBJECT = re.compile(SUBJECT.replace(".", r"\.").format(r"([\w-]+)"))
SHORT_S, LONG_S = 10.0, 120.0
"""Seconds that an agent has: where its time is to run out, and where not even on a busy machine."""

SOLVE = keys("mkdir -p /app && touch /app/answer")
SOLVES = (SOLVE, DONE, DONE)


@dataclass(frozen=True)
class Trouble:
    """What goes wrong, and what has to be set for it."""

    answers: Sequence[Answer | str] = SOLVES
    task: Callable[..., Path] = make_task
    agent: dict[str, Any] = field(default_factory=dict)
    """Of `env.agent`."""
    harness: dict[str, Any] = field(default_factory=dict)
    """Of `env.agent.harness`."""


TOO_LONG = "This model's maximum context length is 32 tokens."
WAITS = Trouble((SOLVE, keys("sleep 600", duration=600)), partial(make_task, agent_timeout_s=SHORT_S))

TROUBLES = {
    "nothing": Trouble(),
    "out-of-time": WAITS,
    "out-of-time-masked": Trouble(WAITS.answers, WAITS.task, harness={"agent_timeout": "mask"}),
    "out-of-turns": Trouble((SOLVE, keys("true")), agent={"max_turns": 2}),
    "out-of-context": Trouble((SOLVE, Answer(status=400, message=TOO_LONG))),
    "answers-cut": Trouble((SOLVE, Answer('{"analysis": "and so on', cut=True))),
    "shell-removed": Trouble((keys("rm -f /bin/bash /usr/bin/bash", duration=1.0), keys("true"), DONE, DONE)),
    "agent-raises": Trouble(harness={"agent": "defective_agent:Defective"}),
    "sandbox-cannot-be-built": Trouble(task=partial(make_task, dockerfile="FROM debian:12-slim\nRUN exit 3\n")),
    "verifier-says-nothing": Trouble(task=partial(make_task, test="true")),
    "verifier-hangs": Trouble(task=partial(make_task, test="sleep 600", verifier_timeout_s=3.0)),
}


def about(task: Callable[..., Path], folder: Path, subject: str, **more: Any) -> Path:
    """Write a task that says what it is about."""
    made = task(folder / subject, **{"agent_timeout_s": LONG_S} | getattr(task, "keywords", {}) | more)
    (made / "instruction.md").write_text(f"Create the file /app/answer. {SUBJECT.format(subject)}\n")
    return made


def subject_of(prompt: str) -> str:
    """What a task is about, by its prompt; "" where it does not say."""
    found = _SUBJECT.search(prompt)
    return found[1] if found else ""


def answers(prompt: str) -> Answer:
    """What the model says, by what the task is about."""
    trouble = TROUBLES.get(subject_of(prompt), TROUBLES["nothing"])
    script: Script = by_turn(trouble.answers)
    return script(prompt)
