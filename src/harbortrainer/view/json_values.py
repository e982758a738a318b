"""Values out of JSON that nobody has checked: each is what it should be, or the given default."""

from collections.abc import Mapping

from harbortrainer.view.line_files import JsonLine


def word(row: Mapping[str, object], key: str) -> str:
    """A text; empty when it is none."""
    value = row.get(key)
    return value if isinstance(value, str) else ""


def whole(row: Mapping[str, object], key: str) -> int:
    """A whole number; 0 when it is none."""
    value = row.get(key)
    return value if isinstance(value, int) else 0


def real(row: Mapping[str, object], key: str) -> float | None:
    """A number; None when it is none."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def table(row: Mapping[str, object], key: str) -> JsonLine:
    """A table; empty when it is none."""
    value = row.get(key)
    return value if isinstance(value, dict) else {}


def listed(row: Mapping[str, object], key: str) -> list[JsonLine]:
    """A list of tables; empty when it is none."""
    value = row.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def reals(row: Mapping[str, object], key: str) -> dict[str, float]:
    """A table of numbers, without what is none."""
    found = table(row, key)
    return {name: value for name in found if (value := real(found, name)) is not None}
