"""The pages with tables of messages quote only messages that exist in the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HARBOR_MESSAGE = "No reward file found at"
"""A message of Harbor's verifier that users see."""


def source_strings() -> str:
    """All string constants of the source, and the constant parts of f-strings, without backquotes."""
    texts = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value.replace("`", ""))
    return "\n".join(texts)


def quoted_messages(file: str, at_least: int) -> list[str]:
    """The messages of a page's tables, split at `...`."""
    page = (ROOT / "docs" / file).read_text(encoding="utf-8")
    tables = re.findall(r"^\| message .*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    messages = [found for table in tables for found in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)]
    rows = sum(table.count("\n") for table in tables)
    assert len(messages) == rows >= at_least, "each message is in one pair of backquotes"
    return [part.strip() for message in messages for part in message.split("...") if len(part.strip()) > 3]


@pytest.mark.parametrize(("file", "at_least"), [("troubleshooting.md", 41), ("local-engine.md", 11)])
def test_quoted_messages_exist_in_source(file: str, at_least: int) -> None:
    source = source_strings()
    assert [part for part in quoted_messages(file, at_least) if part not in source and part != HARBOR_MESSAGE] == []
