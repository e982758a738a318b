"""Formatting of numbers, paths and untrusted text for the pages.

Contract: the only control characters in escaped text are newline and tab. Control, bidirectional and zero-width
characters are replaced by their name or code point. HTML is escaped by templates and charts, not here. Pure.
"""

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path


def duration(seconds: float | None) -> str:
    """Format seconds with a fitting unit.

    Example:
        >>> [duration(value) for value in (None, 0.0421, 7.26, 75, 4000, 90061)]
        ['–', '42 ms', '7.3 s', '1 min 15 s', '1 h 06 min', '25 h 01 min']
    """
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def reward(value: float | None) -> str:
    """Format a reward or an advantage; None becomes a dash."""
    return "–" if value is None else f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) < 1000 else f"{value:.3g}"


def count(value: int) -> str:
    r"""Format a count with a narrow space between thousands.

    Example:
        >>> count(1234567)
        '1\u202f234\u202f567'
    """
    return f"{value:,}".replace(",", "\u202f")


def plural(number: int, one: str) -> str:
    """Format a count with its noun.

    Example:
        >>> plural(1, "trial"), plural(2, "trial")
        ('1 trial', '2 trials')
    """
    return f"{count(number)} {one if number == 1 else one + 's'}"


def relative_path(path: str) -> str:
    """Return the path relative to the working directory if it lies below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


MAX_CHARACTERS = 20_000
"""Most characters of one text on a page; the page states how many are omitted."""

_UNCOMMON = re.compile("[^\\n\\t\\x20-\\x7e\\xa1-\\xac\\xae-\\u02ff\\u0370-\\u058f\\u2190-\\u27bf\\u3040-\\u9fff]")
"""Characters to check one by one; all others are printable."""
_CONTROL_NAMES = {0x00: "NUL", 0x07: "BEL", 0x08: "BS", 0x0D: "CR", 0x1B: "ESC", 0x7F: "DEL"}
_INVISIBLE_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Cn")


@dataclass(frozen=True, slots=True)
class ClippedText:
    """Text for a page: escaped, and cut to a maximum length."""

    text: str
    omitted: int = 0
    """Number of characters cut off at the end."""


def escape_invisible(text: str) -> str:
    r"""Replace invisible characters by their name or code point.

    Example:
        >>> escape_invisible("a\x1b[31mb\u202ec")
        'a‹ESC›[31mb‹U+202E›c'
    """
    return _UNCOMMON.sub(lambda found: _printable(found[0]), text.replace("\r\n", "\n"))


def clip(text: str, limit: int = MAX_CHARACTERS) -> ClippedText:
    """Escape the first `limit` characters of a text."""
    return ClippedText(escape_invisible(text[:limit]), max(0, len(text) - limit))


def _printable(character: str) -> str:
    number = ord(character)
    if number in _CONTROL_NAMES:
        return f"‹{_CONTROL_NAMES[number]}›"
    return f"‹U+{number:04X}›" if unicodedata.category(character) in _INVISIBLE_CATEGORIES else character
