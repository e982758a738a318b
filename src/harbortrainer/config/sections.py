"""A TOML text as the sections a person wrote, so that a key can move to another table with its comment.

tomlkit reads the text and keeps every value, comment and empty line as it was written; it cannot rename or move a
table in place, so that is done here, on what stands under each header.
Contract: what no change names stays as it was, in its place. Two things tomlkit itself changes: the entries of one
`[[array]]` that other tables stand between come together, and the last line gets an end.
"""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import tomlkit
from tomlkit.items import AoT, Array, Comment, InlineTable, Item, Key, Table, Trivia

from harbortrainer.config.table import TomlTable


@dataclass(eq=False)
class Line:
    """A pair of a section, or a comment or empty line.

    Args:
        key: The pair's key as it was written, possibly dotted; empty for what is no pair.
        item: The value, with the comment at its end.
        equals: What stands between key and value.
    """

    key: str
    item: Item
    equals: str = " = "

    def hold(self, item: Item) -> None:
        """Give the pair another value; the comment at its end stays."""
        item.trivia.comment_ws, item.trivia.comment = self.item.trivia.comment_ws, self.item.trivia.comment
        self.item = item

    @property
    def text(self) -> str:
        """The line (a value may run over several) with its end."""
        if not self.key:
            return self.item.as_string()
        around = self.item.trivia
        comment = around.comment and f"{around.comment_ws}{around.comment}"
        return f"{around.indent}{self.key}{self.equals}{self.item.as_string()}{comment}{around.trail or '\n'}"


@dataclass(eq=False)
class Section:
    """A header and what stands under it up to the next.

    Args:
        table: Dotted name of the table; empty above the first header.
        lines: What stands under the header.
        array: Whether the header is `[[table]]`.
        around: What stands around the header: indent, comment.
    """

    table: str
    lines: list[Line] = field(default_factory=list)
    array: bool = False
    around: Trivia = field(default_factory=Trivia)

    @property
    def text(self) -> str:
        """The section with its header."""
        header = f"[[{self.table}]]" if self.array else f"[{self.table}]"
        comment = self.around.comment and f"{self.around.comment_ws or '  '}{self.around.comment}"
        before = f"{self.around.indent}{header}{comment}{self.around.trail}" if self.table else ""
        return before + "".join(line.text for line in self.lines)

    @property
    def end(self) -> int:
        """Index after the last pair: comments and empty lines below it belong to what follows."""
        return max((index + 1 for index, line in enumerate(self.lines) if line.key), default=0)

    def pairs(self) -> list[tuple[str, Line]]:
        """(dotted key in the whole file, line) of each pair."""
        prefix = f"{self.table}." if self.table else ""
        return [(f"{prefix}{line.key}", line) for line in self.lines if line.key]

    def put(self, *lines: Line) -> None:
        """Add lines after the last pair."""
        self.lines[self.end : self.end] = lines


class Sections(list[Section]):
    """The sections of a TOML text, in its order."""

    @property
    def text(self) -> str:
        """The text as it is now."""
        return "".join(section.text for section in self)

    def data(self) -> TomlTable:
        """What the text says.

        Raises:
            tomllib.TOMLDecodeError: It is not TOML 1.0.
        """
        return tomllib.loads(self.text)

    def at(self, table: str) -> Section:
        """The section of a table, made at the end when it is not there."""
        for section in self:
            if section.table == table:
                return section
        if self and not self.text.endswith("\n\n"):
            self[-1].lines.append(Line("", tomlkit.ws("\n")))
        self.append(Section(table))
        return self[-1]

    def put(self, table: str, key: str, value: object) -> None:
        """Add a pair to a table."""
        self.at(table).put(Line(key, tomlkit.item(value)))

    def move(self, section: Section, table: str) -> None:
        """Give a section's table another name; when there is such a table already the two become one."""
        there = next((other for other in self if other.table == table and not section.array), None)
        section.table = table
        if there is not None:
            there.put(*comment_of(section.around), *section.lines[: section.end])
            section.table, section.lines = "", section.lines[section.end :]

    def join_inline_tables(self) -> None:
        """Write inline tables of several lines, which TOML 1.0 does not know, in one; their comments go above."""
        for section in self:
            section.lines = [new for line in section.lines for new in _joined(line)]


def sections(text: str) -> Sections:
    """Split a TOML text.

    Raises:
        tomlkit.exceptions.TOMLKitError: It is not TOML.
    """
    found = Sections([Section("")])
    _split(tomlkit.parse(text).body, "", found)
    return found


def pairs_in(table: InlineTable, prefix: str = "") -> list[Line]:
    """The pairs of an inline table, their keys with a prefix."""
    return [line for key, item in table.value.body if key for line in _lines(key, item, prefix)]


def comment_of(around: Trivia) -> list[Line]:
    """The comment at the end of a line or header as a line of its own; none when there is none."""
    return [Line("", Comment(Trivia(comment=around.comment)))] if around.comment else []


def is_toml(text: str) -> bool:
    """Whether TOML 1.0 reads it, which is what Prime-RL's parser does."""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _split(body: Iterable[tuple[Key | None, Item]], prefix: str, found: Sections) -> None:
    for key, item in body:
        table = prefix + key.as_string().strip() if key else ""
        if isinstance(item, AoT):
            for entry in item.body:
                found.append(Section(table, array=True, around=entry.trivia))
                _split(entry.value.body, f"{table}.", found)
        elif isinstance(item, Table) and key and not key.is_dotted():
            if not item.is_super_table():
                found.append(Section(table, around=item.trivia))
            _split(item.value.body, f"{table}.", found)
        else:
            found[-1].lines += _lines(key, item)


def _lines(key: Key | None, item: Item, prefix: str = "") -> Iterator[Line]:
    if key is None:
        yield Line("", item)
    elif isinstance(item, Table):  # of a dotted key
        for inner, value in item.value.body:
            yield from _lines(inner, value, f"{prefix}{key.as_string()}.")
    else:
        written = prefix + key.as_string()
        yield Line(written.rstrip(), item, written[len(written.rstrip()) :] + key.sep)


def _joined(line: Line) -> Iterator[Line]:
    if is_toml(line.text):
        yield line
        return
    comments: list[Line] = []
    line.hold(tomlkit.value(_one_line(line.item, comments)))
    yield from (*comments, line)


def _one_line(value: Item, comments: list[Line]) -> str:
    text = value.as_string()
    if isinstance(value, Array) and "#" not in text:  # with a comment it keeps its lines, which TOML 1.0 allows
        return "[" + ", ".join(_one_line(tomlkit.item(inner), comments) for inner in value) + "]"
    if not isinstance(value, InlineTable) or "\n" not in text:
        return text
    comments += [new for _, item in value.value.body if isinstance(item, Comment) for new in comment_of(item.trivia)]
    pairs = [f"{pair.key}{pair.equals}{_one_line(pair.item, comments)}" for pair in pairs_in(value)]
    return "{ " + ", ".join(pairs) + " }"
