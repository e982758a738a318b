"""The base of every table of the run file, and what a table is before the schema has read it.

Invariant: a key that is not declared is refused, never dropped; a number is finite; and the sentence under a field is
its help text.
"""

from copy import deepcopy
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

type TomlTable = dict[str, Any]
"""A table as a TOML parser gives it."""


class Table(BaseModel):
    """A table of the run file."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def inherit(self, shared: Self) -> Self:
        """This table; what it does not set is as in `shared`."""
        return shared.model_copy(update=self.model_dump(exclude_unset=True))


def lookup(table: TomlTable, dotted: str, default: Any = None) -> Any:
    """The value at a dotted key (no indices) of nested tables, or `default`."""
    at: object = table
    for part in dotted.split("."):
        if not isinstance(at, dict) or part not in at:
            return default
        at = at[part]
    return at


def changed(data: TomlTable, dotted: str, value: object) -> TomlTable:
    """A copy of `data` with the value at a dotted key; a number names an entry of a list (`source.0.name`).

    A table on the way is made when it is not there; an empty table as the value leaves one that is there as it is.

    Raises:
        KeyError: A part of the key goes through something that is neither a table nor an entry of a list; with what is
            wrong.
    """
    data = deepcopy(data)
    *path, last = dotted.split(".")
    at: object = data
    for name in path:
        if isinstance(at, dict) and at.get(name) in (None, "None"):
            at[name] = {}
        at = _entry(at, name) if isinstance(at, list) else at[name] if isinstance(at, dict) else None
        if not isinstance(at, dict | list):
            raise KeyError(f"{name!r} is not a table")
    if not isinstance(at, dict):
        raise KeyError(f"{path[-1]!r} is a list; say which entry and key, as in {'.'.join(path)}.0.name")
    if value != {} or not isinstance(at.get(last), dict):
        at[last] = value
    return data


def spelled_out(table: TomlTable) -> TomlTable:
    """A copy that TOML can hold: null as the word that Prime-RL and we read as null."""

    def spelled(value: object) -> object:
        if isinstance(value, dict):
            return {key: spelled(item) for key, item in value.items()}
        return [spelled(item) for item in value] if isinstance(value, list) else "None" if value is None else value

    return {key: spelled(value) for key, value in table.items()}


def _entry(entries: list[object], number: str) -> object:
    if not number.isdecimal() or int(number) >= len(entries):
        there = f"it has {len(entries)} (0 to {len(entries) - 1})" if entries else "it has none"
        raise KeyError(f"a list has no entry {number!r}: {there}")
    return entries[int(number)]
