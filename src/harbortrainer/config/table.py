"""Base class of the run file's tables, and helpers for plain TOML tables.

Invariants: an undeclared key is an error, never dropped. Numbers are finite. The docstring under a field is its help
text on the page of keys.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

type TomlValue = Any
type TomlTable = dict[str, TomlValue]
"""A table as the TOML parser returns it."""


class Table(BaseModel):
    """A table of the run file."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def inherit(self, shared: Self) -> Self:
        """Return this table, with unset keys taken from `shared`."""
        return shared.model_copy(update=self.model_dump(exclude_unset=True))


def error_at(location: tuple[str, ...], value: object, message: str) -> ValidationError:
    """Return an error that a validator can raise about a key below its own table."""
    error = PydanticCustomError("value_error", "{message}", {"message": message})
    return ValidationError.from_exception_data("table", [{"type": error, "loc": location, "input": value}])


def lookup(table: TomlTable, dotted: str, default: TomlValue = None) -> TomlValue:
    """Return the value at a dotted key (without indices) of nested tables, or `default`."""
    at: object = table
    for part in dotted.split("."):
        if not isinstance(at, dict) or part not in at:
            return default
        at = at[part]
    return at


def table_of(table: Mapping[str, TomlValue], key: str) -> TomlTable:
    """Return a nested table, or an empty one."""
    found = table.get(key)
    return found if isinstance(found, dict) else {}


def tables_of(table: TomlTable, key: str) -> list[TomlTable]:
    """Return the tables of a nested list."""
    found = table.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def with_value(data: TomlTable, dotted: str, value: object) -> TomlTable:
    """Return a copy of `data` with a value set at a dotted key; a number selects a list entry (`source.0.name`).

    Missing tables are created. An empty table as the value keeps an existing table.

    Raises:
        KeyError: A part of the key is neither a table nor a list entry; the argument says which.
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
        raise KeyError(f"{path[-1]!r} is a list; name an entry and key, e.g. {'.'.join(path)}.0.name")
    if value != {} or not isinstance(at.get(last), dict):
        at[last] = value
    return data


def nulls_as_text(table: TomlTable) -> TomlTable:
    """Return a copy for TOML, which has no null: `None` becomes the text "None", which is read back as null."""

    def convert(value: object) -> object:
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        return [convert(item) for item in value] if isinstance(value, list) else "None" if value is None else value

    return {key: convert(value) for key, value in table.items()}


def _entry(entries: list[object], number: str) -> object:
    if not number.isdecimal() or int(number) >= len(entries):
        count = f"it has {len(entries)} (0 to {len(entries) - 1})" if entries else "it is empty"
        raise KeyError(f"the list has no entry {number!r}: {count}")
    return entries[int(number)]
