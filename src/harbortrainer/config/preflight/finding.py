"""What a check found."""

from dataclasses import dataclass
from enum import IntEnum


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
    """

    level: Level
    about: str
    what: str
    do: str = ""


def green(about: str, what: str) -> Finding:
    """All is well."""
    return Finding(Level.GREEN, about, what)


def yellow(about: str, what: str, do: str) -> Finding:
    """The run can start; it may be slower, or end sooner, than the user thinks."""
    return Finding(Level.YELLOW, about, what, do)


def red(about: str, what: str, do: str) -> Finding:
    """The run cannot work."""
    return Finding(Level.RED, about, what, do)
