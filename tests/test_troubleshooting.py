"""The page on troubleshooting quotes messages that the code has."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
HARBORS_OWN = "No reward file found at"
"""Said by Harbor's verifier; the page has it because a user sees it."""


def spoken() -> str:
    """Every text in the code, f-strings in their parts, without backquotes."""
    texts = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value.replace("`", ""))
    return "\n".join(texts)


def quoted() -> list[str]:
    """The parts of each message of the page's tables of messages."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| message .*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    messages = [found for table in tables for found in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)]
    assert len(messages) == sum(table.count("\n") for table in tables) > 40, (
        "a message is quoted in one pair of backquotes"
    )
    return [part.strip() for message in messages for part in message.split("...") if len(part.strip()) > 3]


def test_every_message_that_is_explained_is_one_that_the_code_has() -> None:
    said = spoken()
    assert [part for part in quoted() if part not in said and part != HARBORS_OWN] == []
