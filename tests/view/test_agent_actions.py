"""The actions of an agent's answer, in the formats of Harbor's agents, and malformed ones."""

import json

import pytest

from harbortrainer.trials.outcome import Outcome
from harbortrainer.view.agent_actions import AgentActions, actions_of, instruction_in
from harbortrainer.view.trial_view import ENDINGS

JSON = {
    "analysis": "see",
    "plan": "sort",
    "commands": [{"keystrokes": "sort a\n", "duration": 0.1}, {"keystrokes": "C-c"}],
}
XML = """<response><analysis>see</analysis><commands>
<keystrokes duration="0.1">sort a
</keystrokes><keystrokes>C-c</keystrokes></commands><task_complete>true</task_complete></response>"""


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (json.dumps(JSON), AgentActions(["sort a\n", "C-c"], "see\nsort")),
        (
            f"Well: {json.dumps(JSON | {'task_complete': True})}<|im_end|>",
            AgentActions(["sort a\n", "C-c"], "see\nsort", True),
        ),
        ('{"commands": [], "task_complete": true}', AgentActions([], "", True)),
        ('{"commands": [3, {"keystrokes": 4}, {"keystrokes": "ls"}], "plan": 5}', AgentActions(["ls"])),
        (XML, AgentActions(["sort a\n", "C-c"], "<response><analysis>see</analysis>", True)),
        ("Look.\n```bash\nls -la\n```\n", AgentActions(["ls -la\n"], "Look.")),
        ("```python\nprint()\n```", None),
        ("I cannot.", None),
        ("", None),
        ('{"commands": "rm"}', None),
        ('{"commands": [{"keystrokes": "ls', None),
        ('{"a":' * 100_000, None),
    ],
)
def test_actions_of_answer(answer: str, expected: AgentActions | None) -> None:
    assert actions_of(answer) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"command": "ls", "timeout": 3}', "ls"),
        ('{"keystrokes": "ls\\n"}', "ls\n"),
        ('{"path": "a.txt"}', 'edit {"path": "a.txt"}'),
        ('{"command": ["ls"]}', 'edit {"command": ["ls"]}'),
        ("not json", "edit not json"),
        ("", "edit"),
    ],
)
def test_actions_of_tool_calls(arguments: str, expected: str) -> None:
    assert actions_of("I look.", [("edit", arguments)]) == AgentActions([expected], "I look.")


@pytest.mark.parametrize(
    ("answer", "cut", "expected"),
    [
        ("```bash\n$ ls -la\n```\nIt lists files.", False, AgentActions(["ls -la"])),
        ("exit", False, AgentActions([], complete=True)),
        ("", False, AgentActions([])),
        ("ls -la /usr/sha", True, AgentActions([])),
    ],
)
def test_actions_of_the_plain_agent(answer: str, cut: bool, expected: AgentActions) -> None:
    assert actions_of(answer, plain=True, cut=cut) == expected


def test_instruction_is_found_in_the_first_prompt() -> None:
    assert (
        instruction_in("Rules.\nTask Description:\nSort a.\n\nThen b.\n\n\nCurrent terminal state:\n$")
        == "Sort a.\n\nThen b."
    )
    assert instruction_in("Sort a.\n") == "Sort a."


def test_every_outcome_has_an_ending() -> None:
    assert set(ENDINGS) == set(Outcome)
