"""The help: each command in one group with one whole line, and two valid examples."""

import shlex
from typing import Any

import pytest
import typer

from harbortrainer.cli import app
from harbortrainer.cli_help import EXAMPLES, GROUPS
from harbortrainer.config.prime_rl_schema import is_known

COMMAND: Any = typer.main.get_command(app)
LEAVES = {
    f"{name} {word}".strip(): below
    for name, command in COMMAND.commands.items()
    for word, below in getattr(command, "commands", {"": command}).items()
}


def help_of(command, name: str) -> list[str]:
    with command.make_context(name, [], terminal_width=80, max_content_width=80, resilient_parsing=True) as context:
        return command.get_help(context).splitlines()


@pytest.mark.parametrize("name", ["", "tasks", "config", "images"])
def test_each_command_has_one_whole_line(name):
    command = COMMAND.commands[name] if name else COMMAND
    lines = help_of(command, name)
    assert max(map(len, lines)) <= 80
    for word in command.commands:
        (line,) = [line for line in lines if line.startswith(f"  {word} ")]
        assert not line.endswith("...") and line.endswith(".")


def test_groups_list_every_command_once():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMAND.commands)
    lines = help_of(COMMAND, "harbortrainer")
    assert [line[:-1] for line in lines if line[:-1] in GROUPS and line.endswith(":")] == list(GROUPS)


@pytest.mark.parametrize("name", LEAVES)
def test_each_command_has_two_valid_examples(name):
    first, second = EXAMPLES[name]
    assert first != second
    for example in (first, second):
        assert f"  harbortrainer {example}" in help_of(LEAVES[name], name)
        words = shlex.split(example.removeprefix(name))
        with LEAVES[name].make_context(name, words) as context:
            options = [word[2:].replace("-", "_") for word in context.args if word.startswith("--")]
            assert all(map(is_known, options))
            assert not context.args or options
    assert EXAMPLES.keys() == LEAVES.keys()
