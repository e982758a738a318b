"""Figures, and the place of a folder, as people write them."""

from pathlib import Path


def duration(seconds: float | None) -> str:
    """Seconds in the units that fit.

    Example:
        >>> [duration(value) for value in (None, 0.0421, 7.25, 75, 4000, 90061)]
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
    """A reward or an advantage; a dash where there is none."""
    return "–" if value is None else f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) < 1000 else f"{value:.3g}"


def count(value: int) -> str:
    """A count, thousands apart.

    Example:
        >>> count(1234567)
        '1 234 567'
    """
    return f"{value:,}".replace(",", "\u202f")


def several(number: int, one: str, many: str = "") -> str:
    """A number with its noun.

    Example:
        >>> several(1, "trial"), several(2, "trial")
        ('1 trial', '2 trials')
    """
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def near(path: str) -> str:
    """A path from where we are, when it lies below."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
