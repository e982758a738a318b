"""Findings of the checks, and their output: a table, warnings, or the error that stops a launch."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from harbortrainer.errors import UserError, joined


class Level(IntEnum):
    """Severity of a finding. A red one stops a launch."""

    GREEN = 0
    YELLOW = 1
    RED = 2


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    Args:
        level: Severity.
        about: What was checked, in two or three words.
        what: The result of the check.
        do: What the user should do; empty for a green finding.
        where: The file and key that it comes from; empty when it concerns only the machine.
    """

    level: Level
    about: str
    what: str
    do: str = ""
    where: str = ""


def green(about: str, what: str) -> Finding:
    """Make a green finding: the check passed."""
    return Finding(Level.GREEN, about, what)


def yellow(about: str, what: str, do: str, where: str = "") -> Finding:
    """Make a yellow finding: the run can start, but may be slower or fail later."""
    return Finding(Level.YELLOW, about, what, do, where)


def red(about: str, what: str, do: str, where: str = "") -> Finding:
    """Make a red finding: the run cannot work."""
    return Finding(Level.RED, about, what, do, where)


def red_ones(findings: Iterable[Finding]) -> list[Finding]:
    """Return the red findings."""
    return [finding for finding in findings if finding.level is Level.RED]


def stop_on_red(findings: list[Finding]) -> None:
    """Raise an error if a finding is red.

    Raises:
        UserError: All red findings.
    """
    if error := joined(map(error_of, red_ones(findings))):
        raise error


def error_of(finding: Finding) -> UserError:
    """Return a red finding as an error."""
    return UserError(finding.what, where=finding.where or finding.about, do=finding.do)


def warn(findings: list[Finding]) -> None:
    """Print one line for each yellow finding."""
    for finding in findings:
        if finding.level is Level.YELLOW:
            print(f"warning: {error_of(finding)}")


def show(findings: list[Finding]) -> None:
    """Print the findings as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    # Long paths and keys are wrapped; by default rich would cut them.
    table = Table("", "", Column(overflow="fold"), show_edge=False, show_header=False, padding=(0, 1))
    for finding in findings:
        colour = finding.level.name.lower()
        lines = [finding.what, finding.where, f"-> {finding.do}" if finding.do else ""]
        table.add_row(f"[{colour}]{colour}[/]", finding.about, escape("\n".join(filter(None, lines))))
    Console().print(table)
