"""The help: each command in one group with one whole line, and two valid examples."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from harbortrainer.cli import app
from harbortrainer.cli_help import EXAMPLES, GROUPS
from harbortrainer.config.prime_rl_schema import is_known

ROOT = Path(__file__).parents[1]
COMMAND: Any = typer.main.get_command(app)
LEAVES = {
    f"{name} {word}".strip(): below
    for name, command in COMMAND.commands.items()
    for word, below in getattr(command, "commands", {"": command}).items()
}


def help_of(command, name: str) -> list[str]:
    with command.make_context(name, [], terminal_width=80, max_content_width=80, resilient_parsing=True) as context:
        return command.get_help(context).splitlines()


@pytest.mark.parametrize("name", ["", "tasks", "config", "images", "sandboxes"])
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
        check_words(name, shlex.split(example.removeprefix(name)))
    assert EXAMPLES.keys() == LEAVES.keys()


def check_words(name: str, words: list[str]) -> None:
    """Parse the words after a command's name; options that are not the command's must be keys of the run file."""
    with LEAVES[name].make_context(name, words) as context:
        options = [word[2:].replace("-", "_") for word in context.args if word.startswith("--")]
        assert all(map(is_known, options)), words
        assert not context.args or options, words


def commands_in(page: str) -> list[str]:
    """Return the commands of a page: the lines of its shell blocks, and its inline code."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [part for block in blocks for line in block.splitlines() for part in line.partition(" # ")[0].split("&&")]
    return [line.strip() for line in [*lines, *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page)]]


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_commands_of_a_page_exist(page):
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    own, made = [], []
    for command in commands_in((ROOT / page).read_text().replace("\\\n", " ")):
        words = shlex.split(command) if "'" not in command else []
        if words[:1] == ["make"]:
            made += words[1:]
        elif words[1:3] == ["-m", "src.train"]:
            own.append(["train", *words[3:]])
        elif words and Path(words[0]).name == "harbortrainer":
            own.append(words[1:])
    assert len(own) >= 6 and len(made) >= 2
    assert set(made) <= targets
    for words in own:
        (name,) = [name for name in LEAVES if name in (" ".join(words[:2]), words[0])]
        check_words(name, words[len(name.split()) :])
