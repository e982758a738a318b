"""The names in the tables of docs/metrics.md, for the tests that compare them with real runs."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
ROW = re.compile(r"^\| (`.+?) \| (both|embedded|trainer) \|", re.MULTILINE)


def documented(*engines: str) -> list[str]:
    """Every metric that is written there for these engines; `<x>` and a final `...` are place-holders."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [name for names, engine in rows if engine in engines for name in re.findall(r"`([^`]+)`", names)]


def matches(name: str, key: str) -> bool:
    """Whether a documented name stands for this key.

    Example:
        >>> matches("eval/<source>/reward/...", "eval/held-out/reward/p10")
        True
    """
    parts = re.split(r"(<\w+>)", name.removesuffix("/..."))
    pattern = "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in parts)
    return re.fullmatch(pattern + ("/(mean|min|max|p10|p90)" if name.endswith("/...") else ""), key) is not None
