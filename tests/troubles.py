"""One faulty task per trial outcome, with the model's scripted answers.

A task names its fault in its instruction (`This is about: out-of-time.`), so one scripted server can answer all of them
at once. docs/outcomes.md has the outcome of each.
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
"""Agent timeouts in seconds: one that runs out, and one that does not run out even on a busy machine."""

SOLVE = keys("mkdir -p /app && touch /app/answer")
SOLVES = (SOLVE, DONE, DONE)


@dataclass(frozen=True)
class Trouble:
    """A fault: the task, the model's answers and the settings that cause it."""

    answers: Sequence[Answer | str] = SOLVES
    task: Callable[..., Path] = make_task
    agent: dict[str, Any] = field(default_factory=dict)
    """Keys of `env.agent`."""
    harness: dict[str, Any] = field(default_factory=dict)
    """Keys of `env.agent.harness`."""


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
    "verifier-edits-its-tests": Trouble(task=partial(make_task, test="sed -i '$a true' /tests/test.sh; exit 1")),
    "verifier-hangs": Trouble(task=partial(make_task, test="sleep 600", verifier_timeout_s=3.0)),
}


def about(task: Callable[..., Path], folder: Path, subject: str, **more: Any) -> Path:
    """Write a task whose instruction names its fault."""
    made = task(folder / subject, **{"agent_timeout_s": LONG_S} | getattr(task, "keywords", {}) | more)
    (made / "instruction.md").write_text(f"Create the file /app/answer. {SUBJECT.format(subject)}\n")
    return made


def subject_of(prompt: str) -> str:
    """Return the fault that a prompt names; "" if it names none."""
    found = _SUBJECT.search(prompt)
    return found[1] if found else ""


def answers(prompt: str) -> Answer:
    """Return the model's answer to a prompt, by the fault that the prompt names."""
    trouble = TROUBLES.get(subject_of(prompt), TROUBLES["nothing"])
    script: Script = by_turn(trouble.answers)
    return script(prompt)
