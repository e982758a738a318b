"""TOML as the lines a person wrote: statements with their comments, so that a file can be changed in place.

Contract: joining the text of all statements gives the text back, byte for byte. Nothing is validated here; tomllib
does that.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Statement:
    """One statement, or one line without any.

    Args:
        kind: "table" (`[a.b]`), "array" (`[[a.b]]`), "pair" (`key = value`) or "other" (comment, empty line).
        table: Dotted name of the table it stands in; for a table, its own name.
        key: The key of a pair, as it was written (possibly dotted), else empty.
        text: All of it, with its comment and the end of its last line.
    """

    kind: str
    table: str
    key: str
    text: str

    @property
    def path(self) -> str:
        """Dotted key of a pair, dotted name of a table."""
        return ".".join(part for part in (self.table, self.key) if part)

    @property
    def comment(self) -> str:
        """The comment at the end of the statement, with its `#`, or nothing."""
        return self.text[end_of_code(self.text) :].strip()

    def renamed(self, key: str) -> "Statement":
        """The same pair under another key."""
        return replace(self, key=key, text=self.text.replace(self.key, key, 1))


def statements(text: str) -> list[Statement]:
    """Split a TOML text into its statements."""
    found: list[Statement] = []
    table = ""
    for chunk in _chunks(text):
        code = chunk.strip()
        if code.startswith("["):
            kind = "array" if code.startswith("[[") else "table"
            table = code.split("]")[0].strip("[ ").replace(" ", "").replace('"', "")
            found.append(Statement(kind, table, "", chunk))
        elif not code or code.startswith("#"):
            found.append(Statement("other", table, "", chunk))
        else:
            key = chunk.split("=", 1)[0].strip()
            found.append(Statement("pair", table, key, chunk))
    return found


def end_of_code(text: str) -> int:
    """Where the comment at the end of a statement starts, or the length of the text."""
    last = len(text)
    for index, character, depth in _outside_strings(text):
        if character == "#" and depth == 0:
            return index
    return last


def one_line(text: str) -> tuple[str, list[str]]:
    """A statement that runs over several lines as one, and the comments that stood inside it."""
    kept, comments, at = "", [], 0
    for index, character, _ in _outside_strings(text):
        if index < at:
            continue
        kept += text[at:index]
        at = index + 1
        if character == "#":
            at = index + len(text[index:].split("\n")[0])
            comments.append(text[index:at].strip())
        elif character == "\n":
            kept = kept.rstrip() + " "
            at += len(text[at:]) - len(text[at:].lstrip(" \t"))
        elif character == "}":
            kept = kept.rstrip().rstrip(",").rstrip() + " }"
        else:
            kept += character
    return (kept + text[at:]).strip(), comments


def _chunks(text: str) -> Iterator[str]:
    """Lines, joined while a bracket or a string is open."""
    chunk = ""
    for line in text.splitlines(keepends=True):
        chunk += line
        if not _open(chunk):
            yield chunk
            chunk = ""
    if chunk:
        yield chunk


def _open(chunk: str) -> bool:
    depth = 0
    for _, character, depth_after in _outside_strings(chunk):
        depth = depth_after
        if character == "":
            return True
    return depth > 0


def _outside_strings(text: str) -> Iterator[tuple[int, str, int]]:
    """(index, character, bracket depth after it) of what is in no string and no comment.

    A `#` that starts a comment is given, what follows it is not. A string that does not end gives an empty character.
    """
    index, depth = 0, 0
    while index < len(text):
        character = text[index]
        if character in "\"'":
            index = _after_string(text, index)
            if index > len(text):
                yield len(text), "", depth
            continue
        depth += (character in "[{") - (character in "]}")
        yield index, character, depth
        if character == "#":
            index = text.find("\n", index)
            if index < 0:
                return
            continue
        index += 1


def _after_string(text: str, start: int) -> int:
    """The index after the string that starts at `start`; past the end when it does not end."""
    quote = text[start]
    fence = quote * 3 if text.startswith(quote * 3, start) else quote
    index = start + len(fence)
    while index < len(text):
        if quote == '"' and text[index] == "\\":
            index += 2
        elif text.startswith(fence, index):
            return index + len(fence)
        elif len(fence) == 1 and text[index] == "\n":
            return index
        else:
            index += 1
    return len(text) + 1
