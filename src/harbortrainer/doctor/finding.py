"""What a check found, and how it is told: a table, a warning, or the error that stops a launch."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from harbortrainer.errors import UserError


class Level(IntEnum):
    """How bad a finding is; a red one stops a launch."""

    GREEN = 0
    YELLOW = 1
    RED = 2


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    Args:
        level: How bad it is.
        about: What was looked at, two or three words.
        what: What was found.
        do: What the user should do; empty when nothing.
        where: The file and the key in it that it comes from; empty when the machine alone is to blame.
    """

    level: Level
    about: str
    what: str
    do: str = ""
    where: str = ""


def green(about: str, what: str) -> Finding:
    """All is well."""
    return Finding(Level.GREEN, about, what)


def yellow(about: str, what: str, do: str, where: str = "") -> Finding:
    """The run can start; it may be slower, or end sooner, than the user thinks."""
    return Finding(Level.YELLOW, about, what, do, where)


def red(about: str, what: str, do: str, where: str = "") -> Finding:
    """The run cannot work."""
    return Finding(Level.RED, about, what, do, where)


def red_ones(findings: Iterable[Finding]) -> list[Finding]:
    """Those that stop a launch."""
    return [finding for finding in findings if finding.level is Level.RED]


def stop_on_red(findings: list[Finding]) -> None:
    """Refuse to start.

    Raises:
        UserError: The first red finding, and how many more there are.
    """
    reds = red_ones(findings)
    if reds:
        more = f" (and {len(reds) - 1} more; `harbortrainer doctor` shows all)" if len(reds) > 1 else ""
        raise UserError(reds[0].what + more, where=reds[0].where or reds[0].about, do=reds[0].do)


def warn(findings: list[Finding]) -> None:
    """One line for each yellow finding."""
    for finding in findings:
        if finding.level is Level.YELLOW:
            print(f"warning: {finding.where or finding.about}: {finding.what}; {finding.do}")


def show(findings: list[Finding]) -> None:
    """A table: colour, what was looked at, what was found, where it comes from, what to do."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_edge=False, show_header=False, padding=(0, 1))
    for finding in findings:
        colour = finding.level.name.lower()
        lines = [finding.what, finding.where, f"-> {finding.do}" if finding.do else ""]
        table.add_row(f"[{colour}]{colour}[/]", finding.about, escape("\n".join(filter(None, lines))))
    Console().print(table)
