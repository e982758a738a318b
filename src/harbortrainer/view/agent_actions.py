"""Actions of an agent's answer, in the formats of Harbor's agents, and the task's instruction in a prompt.

Contract: the text is the model's, so anything may be missing or malformed. An answer in no known format has no actions,
and the page shows it as it is. Pure.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harbortrainer.trials.plain_format import command_of

COMMAND_KEYS = ("keystrokes", "command", "cmd", "commands", "script", "code", "input")
"""Names of the argument that holds a tool's command."""
_INSTRUCTION = re.compile(r"Task Description:\n(.*?)\n\s*Current terminal state:", re.DOTALL)
_XML_KEYSTROKES = re.compile(r"<keystrokes[^>]*>(.*?)</keystrokes>", re.DOTALL)
_XML_COMPLETE = re.compile(r"<task_complete>\s*true\s*</task_complete>")
_FENCED = re.compile(r"```(?:bash|sh|shell)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AgentActions:
    """The actions of one answer."""

    commands: Sequence[str]
    """Text that goes to the terminal or the tool, in order."""
    thoughts: str = ""
    """The agent's analysis and plan."""
    complete: bool = False
    """Whether the answer declares the task complete."""


def instruction_in(prompt: str) -> str:
    """Return the instruction within Terminus-2's first prompt; other agents' prompts are returned whole."""
    found = _INSTRUCTION.search(prompt)
    return found[1].strip() if found else prompt.strip()


def actions_of(
    answer: str, calls: Sequence[tuple[str, str]] = (), *, plain: bool = False, cut: bool = False
) -> AgentActions | None:
    """Return the actions of an answer; None if its format is unknown.

    Args:
        answer: Text of the answer.
        calls: Its tool calls: name and raw arguments.
        plain: Whether the plain agent read it.
        cut: Whether it was cut at its length.
    """
    if plain:
        command = command_of(answer, cut=cut)
        return AgentActions([command] if command not in ("", "exit") else [], complete=command == "exit")
    if calls:
        return AgentActions([_command_of(name, arguments) for name, arguments in calls], answer.strip())
    return _of_json(answer) or _of_xml(answer) or _of_blocks(answer)


def _command_of(name: str, arguments: str) -> str:
    table = _first_object(arguments)
    found = [value for key in COMMAND_KEYS if isinstance(value := (table or {}).get(key), str)]
    return found[0] if found else f"{name} {arguments}".strip()


def _of_json(answer: str) -> AgentActions | None:
    """Read Terminus-2's JSON format."""
    table = _first_object(answer)
    if table is None or not isinstance(table.get("commands"), list):
        return None
    thoughts = [value.strip() for key in ("analysis", "plan") if isinstance(value := table.get(key), str)]
    complete = table.get("task_complete") in (True, "true")
    return AgentActions(list(_keystrokes(table["commands"])), "\n".join(filter(None, thoughts)), complete)


def _keystrokes(commands: object) -> Iterator[str]:
    for command in commands if isinstance(commands, list) else ():
        if isinstance(command, dict) and isinstance(keystrokes := command.get("keystrokes"), str):
            yield keystrokes


def _first_object(text: str) -> dict[str, object] | None:
    """Return the first JSON object in a text."""
    start = text.find("{")
    try:
        found, _ = json.JSONDecoder(strict=False).raw_decode(text, start) if start >= 0 else (None, 0)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _of_xml(answer: str) -> AgentActions | None:
    """Read Terminus-2's XML format."""
    commands, complete = _XML_KEYSTROKES.findall(answer), _XML_COMPLETE.search(answer) is not None
    return AgentActions(commands, answer.partition("<commands>")[0].strip(), complete) if commands or complete else None


def _of_blocks(answer: str) -> AgentActions | None:
    """Read fenced shell code, as agents without a format of their own write it."""
    commands = _FENCED.findall(answer)
    return AgentActions(commands, _FENCED.sub("", answer).strip()) if commands else None
