"""Metric names in the tables of docs/metrics.md, for tests that compare them with real runs."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
ROW = re.compile(r"^\| (`.+?) \| (both|embedded|trainer) \|", re.MULTILINE)


def documented_metrics(*engines: str) -> list[str]:
    """Return the documented metrics of these engines; `<x>` and a final `...` are placeholders."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [name for names, engine in rows if engine in engines for name in re.findall(r"`([^`]+)`", names)]


def matches(name: str, key: str) -> bool:
    """Return whether a documented name describes this key of a metrics line.

    Example:
        >>> matches("eval/<source>/reward/...", "eval/held-out/reward/p10")
        True
    """
    parts = re.split(r"(<\w+>)", name.removesuffix("/..."))
    pattern = "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in parts)
    return re.fullmatch(pattern + ("/(mean|min|max|p10|p90)" if name.endswith("/...") else ""), key) is not None
