"""Check that docs, docstrings and messages have short sentences and no banned words.

Usage: check_prose.py [PATH ...], by default the pages and `src`. It prints one line a finding and exits with 1 if
any is found. Code, links and quoted output are not prose.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEFAULT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "src")
MOST_WORDS = 30
# Words that only this project used, and passives that hide who reports what.
BANNED = re.compile(
    r"\b(?:(?:is|are|was|were|be|been) (?:told|said|asked for)|tells of|told of|nursery|fates?|honoured|how-manieth|"
    r"for want of|so it is said|said so)\b",
    re.IGNORECASE,
)
NO_PROSE = re.compile(r"```.*?```|<!--.*?-->|\$\$.*?\$\$", re.DOTALL)
INDENTED = re.compile(r"\n\n(?: {4}.*(?:\n|$))+")
PROGRAM = re.compile(r"\n|; do |\(\);")
INLINE_CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
# A full stop ends a sentence if a capital, a digit or markup follows; "e.g.", "i.e." and "vs." do not end one.
END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!vs)[.!?]['\")*_]*\s+(?=[A-Z0-9`'\"(*_\[])")


def sentences(text: str) -> Iterator[str]:
    """Split plain text into sentences; a span of code counts as one word."""
    plain = LINK.sub(r"\1", INLINE_CODE.sub("`code`", text))
    yield from (" ".join(sentence.split()) for sentence in END.split(plain))


def markdown_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs, list items and table cells of a page, each with its line number."""
    prose = NO_PROSE.sub(lambda found: "\n" * found[0].count("\n"), text)
    block: list[str] = []
    start = 1
    for number, line in enumerate([*prose.splitlines(), ""], 1):
        stripped = line.strip()
        item = re.match(r"(?:[-*+]|\d+\.)\s+", stripped)
        if block and (not stripped or item or stripped.startswith(("#", "|", "<"))):
            yield start, " ".join(block)
            block = []
        if stripped.startswith("|"):
            yield from ((number, cell) for cell in INLINE_CODE.sub("`code`", stripped).strip("|").split("|"))
        elif stripped and not stripped.startswith(("#", "<")):
            start = start if block else number
            block.append(stripped[item.end() :] if item else stripped)


def python_blocks(code: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of docstrings, and string constants of several words, each with its line number.

    Other strings of several lines, shell loops and lists of signatures are not prose.
    """
    tree = ast.parse(code)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    formatted = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in formatted:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "`code`" for part in node.values)
            if "\n" not in text.strip():
                yield node.lineno, text.strip()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                # An indented block after an empty line is code; each entry of `Args:` and `Returns:` is a paragraph.
                prose = INDENTED.sub(lambda found: "\n" * found[0].count("\n"), inspect.cleandoc(node.value))
                entries = re.sub(r"\n\s*(?=[\w*`]+(?: \([^)]*\))?: )", "\n\n", prose)
                yield from ((node.lineno + line - 1, block) for line, block in markdown_blocks(entries))
            elif node.value.count(" ") > 3 and not PROGRAM.search(node.value):
                yield node.lineno, node.value


def findings(path: Path) -> Iterator[str]:
    """Yield `file:line: finding` for each long sentence and banned word of one file."""
    text = path.read_text(encoding="utf-8")
    blocks = python_blocks(text) if path.suffix == ".py" else markdown_blocks(text)
    seen: set[str] = set()
    for line, block in blocks:
        for sentence in sentences(block):
            if sentence in seen:
                continue
            seen.add(sentence)
            words = len(re.findall(r"[\w`][\w`'’./-]*", sentence))
            if words > MOST_WORDS:
                yield f"{path}:{line}: {words} words, at most {MOST_WORDS}: {sentence[:100]}"
            if banned := BANNED.search(sentence):
                yield f"{path}:{line}: banned words {banned[0]!r}: {sentence[:100]}"


def main(arguments: list[str]) -> int:
    """Check the given files and folders; return the exit code."""
    found = 0
    for path in map(Path, arguments or [str(ROOT / name) for name in DEFAULT]):
        files = [path] if path.is_file() else sorted([*path.rglob("*.md"), *path.rglob("*.py")])
        for finding in (finding for file in files for finding in findings(file)):
            found += 1
            print(finding)
    print(f"prose: {found} findings")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
