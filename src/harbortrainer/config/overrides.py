"""Overrides on the command line, as Prime-RL's: `--trainer.optim.lr 1e-5 --clean --no-ckpt`.

Contract: dashes in a key stand for underscores; `--key=value`, `--key value`, several values make a list, no value
means true, `--no-key` means false (or no such table), a value that starts with `[` or `{` is JSON. A value stays text
until the schema reads it.
"""

import json
from collections.abc import Sequence
from typing import Any

from harbortrainer.errors import UserError


def parse(arguments: Sequence[str]) -> list[tuple[str, Any]]:
    """Turn command-line words into (dotted key, value) pairs, in their order.

    Raises:
        UserError: A word that belongs to no key, or JSON that cannot be read.
    """
    pairs: list[tuple[str, Any]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"{word!r} belongs to no option", where="command line", do="write overrides as --key value")
        key, equals, value = word[2:].partition("=")
        values = [value] if equals else _take_values(words)
        pairs.append(_pair(key.replace("-", "_"), values))
    return pairs


def apply(
    data: dict[str, Any], pairs: Sequence[tuple[str, Any]], tables: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """A copy of `data` with each pair set; a table on the way is made when it is not there.

    Args:
        data: The tables of a file; not changed.
        pairs: What `parse` gave.
        tables: Dotted keys of tables: `--ckpt` makes an empty one, `--no-ckpt` takes it away.

    Raises:
        UserError: A key that goes through something that is not a table.
    """
    data = _copy_tables(data)
    for dotted, value in pairs:
        *path, last = dotted.split(".")
        at = data
        for name in path:
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                where = f"command line: --{dotted.replace('_', '-')}"
                raise UserError(f"{name!r} is not a table", where=where, do="change the file instead")
        if value is NO:
            at[last] = None if dotted in tables else False
        elif value is not True or dotted not in tables:
            at[last] = value
        else:
            at.setdefault(last, {})
    return data


NO = object()
"""The value of `--no-key`."""


def _take_values(words: list[str]) -> list[str]:
    values = []
    while words and not words[0].startswith("--"):
        values.append(words.pop(0))
    return values


def _pair(key: str, values: list[str]) -> tuple[str, Any]:
    if not values:
        return (key.removeprefix("no_"), NO) if key.startswith("no_") else (key, True)
    if len(values) > 1:
        return key, [_value(key, value) for value in values]
    return key, _value(key, values[0])


def _value(key: str, text: str) -> Any:
    if text[:1] not in ("[", "{"):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"command line: --{key}"
        raise UserError(f"not valid JSON ({error.msg})", where=where, do="quote the value for the shell") from None


def _copy_tables(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy_tables(item) for key, item in value.items()}
    return [_copy_tables(item) for item in value] if isinstance(value, list) else value
