"""A TOML text that can be changed without losing a comment.

Contract: what is not named in a change stays as it was written, in its place.
"""

import tomllib
from dataclasses import replace
from typing import Any

import tomlkit

from harbortrainer.config.toml_lines import Statement, one_line, statements


class Document:
    """The statements of a TOML text."""

    def __init__(self, text: str) -> None:
        self.statements = statements(text)

    @property
    def text(self) -> str:
        """The text as it is now."""
        return "".join(statement.text for statement in self.statements)

    def data(self) -> dict[str, Any]:
        """What the text says.

        Raises:
            tomllib.TOMLDecodeError: It is not TOML.
        """
        return tomllib.loads(self.text)

    def has_table(self, name: str) -> bool:
        """Whether there is a `[name]`."""
        return any(s.kind == "table" and s.table == name for s in self.statements)

    def has(self, path: str) -> bool:
        """Whether there is a pair with this dotted key."""
        return any(s.kind == "pair" and s.path == path for s in self.statements)

    def put(self, table: str, key: str, value: Any, comment: str = "") -> None:
        """Add a pair to a table, which is made at the end when it is not there."""
        self.put_text(table, key, f"{key} = {inline(value)}" + (f"  {comment}" if comment else "") + "\n")

    def put_text(self, table: str, key: str, text: str) -> None:
        """Add a pair that is already written to a table."""
        if not self.has_table(table):
            gap = "" if not self.statements or self.text.endswith("\n\n") else "\n"
            self._end_line()
            self.statements.append(Statement("table", table, "", f"{gap}[{table}]\n"))
        last = max(i for i, s in enumerate(self.statements) if s.table == table and s.kind in ("table", "pair"))
        self._end_line(last)
        self.statements.insert(last + 1, Statement("pair", table, key, text))

    def rename_table(self, old: str, new: str) -> None:
        """Give a table and all tables in it another name; when the new one is there already they become one."""
        moved = [s for s in self.statements if s.kind == "pair" and s.table == old]
        if self.has_table(old) and self.has_table(new):
            self.statements = [
                s for s in self.statements if s not in moved and not (s.kind == "table" and s.table == old)
            ]
            for statement in moved:
                self.put_text(new, statement.key, statement.text)
        self.statements = [self._renamed(statement, old, new) for statement in self.statements]

    def rename_key(self, table: str, old: str, new: str) -> None:
        """Give a pair of a table another key."""
        self.statements = [
            s.renamed(new) if s.kind == "pair" and s.table == table and s.key == old else s for s in self.statements
        ]

    def pop(self, path: str) -> str:
        """Take out a pair; returns the comment at its end."""
        for index, statement in enumerate(self.statements):
            if statement.kind == "pair" and statement.path == path:
                del self.statements[index]
                return statement.comment
        return ""

    def join_inline_tables(self) -> bool:
        """Write inline tables of several lines, which TOML 1.0 does not know, in one; their comments go above."""
        before = self.text
        self.statements = [new for old in self.statements for new in _joined(old)]
        return self.text != before

    def _renamed(self, statement: Statement, old: str, new: str) -> Statement:
        if statement.table != old and not statement.table.startswith(f"{old}."):
            return statement
        table = new + statement.table.removeprefix(old)
        if statement.kind not in ("table", "array"):
            return replace(statement, table=table)
        return replace(statement, table=table, text=statement.text.replace(statement.table, table, 1))

    def _end_line(self, index: int = -1) -> None:
        if self.statements and not self.statements[index].text.endswith("\n"):
            self.statements[index] = replace(self.statements[index], text=self.statements[index].text + "\n")


def inline(value: Any) -> str:
    """A value as TOML on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {inline(item)}" for key, item in value.items()) + " }" if value else "{}"
    return tomlkit.item(value).as_string()


def _joined(statement: Statement) -> list[Statement]:
    value = statement.text.partition("=")[2].lstrip()
    if statement.kind != "pair" or not value.startswith("{") or "\n" not in value.rstrip("\n"):
        return [statement]
    line, comments = one_line(statement.text)
    above = [Statement("other", statement.table, "", f"{comment}\n") for comment in comments]
    return [*above, replace(statement, text=f"{line}\n")]
