"""What a model or a task wrote, made fit to be shown: every character visible, no more of it than a page can hold.

Contract: the result holds no control character but newline and tab, and none that turns the direction of writing or
takes no room: each is shown by its name or its number. HTML is not escaped here: templates and drawings do that.
Pure.
"""

import re
import unicodedata
from dataclasses import dataclass

MOST_CHARACTERS = 20_000
"""Of one text on a page; the rest is left out, and said so."""

_SUSPECT = re.compile("[^\\n\\t\\x20-\\x7e\\xa1-\\xac\\xae-\\u02ff\\u0370-\\u058f\\u2190-\\u27bf\\u3040-\\u9fff]")
"""What is looked at one by one; the rest is known to be plain."""
_NAMED = {0x00: "NUL", 0x07: "BEL", 0x08: "BS", 0x0D: "CR", 0x1B: "ESC", 0x7F: "DEL"}
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Cn")


@dataclass(frozen=True, slots=True)
class ShownText:
    """A text on a page."""

    text: str
    """What is shown."""
    left_out: int = 0
    """Characters that were there beyond it."""


def visible(text: str) -> str:
    r"""`text` with a name or a number for each character that has no look of its own.

    Example:
        >>> visible("a\x1b[31mb\u202ec")
        'a‹ESC›[31mb‹U+202E›c'
    """
    return _SUSPECT.sub(lambda found: _drawn(found[0]), text.replace("\r\n", "\n"))


def shown(text: str, most: int = MOST_CHARACTERS) -> ShownText:
    """A text made visible, at most `most` of its characters."""
    return ShownText(visible(text[:most]), max(0, len(text) - most))


def _drawn(character: str) -> str:
    number = ord(character)
    if number in _NAMED:
        return f"‹{_NAMED[number]}›"
    return f"‹U+{number:04X}›" if unicodedata.category(character) in _UNSEEN else character
