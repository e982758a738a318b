"""The command that the plain agent reads from an answer, for every form of answer that small models give."""

import pytest

from harbortrainer.trials.plain_format import command_of


@pytest.mark.parametrize(
    ("answer", "command"),
    [
        ("ls", "ls"),
        ("  ls -l \n", "ls -l"),
        ("$ ls", "ls"),
        ("`ls`", "ls"),
        ("```bash\nls\n```", "ls"),
        ("```\n\n$ ls\n```\nThis lists the files.", "ls"),
        ("sort a > b\nrm a", "sort a > b"),
        ("echo `date`", "echo `date`"),
        ("`date` > b", "`date` > b"),
        ("``ls``", "ls"),
        ("`ls", "ls"),
        ("echo a\0b", "echo ab"),
        ("\0\n", ""),
        ("", ""),
        ("```bash\n```", ""),
        (" \n\t\n", ""),
    ],
)
def test_command_is_first_line_that_is_no_fence(answer: str, command: str) -> None:
    assert command_of(answer) == command


@pytest.mark.parametrize(("answer", "command"), [("sort a >", ""), ("ls\nThis li", "ls"), ("ls\n", "ls")])
def test_line_that_was_cut_is_no_command(answer: str, command: str) -> None:
    assert command_of(answer, cut=True) == command
