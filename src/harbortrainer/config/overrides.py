"""Command-line overrides in Prime-RL's syntax: `--trainer.optim.lr 1e-5 --clean --no-ckpt`.

    --key value, --key=value        set a key; dashes in a key stand for underscores
    --key a b                       set a list
    --key '[1]', --key '{"a": 1}'   set a JSON value
    --key                           set a switch to true, or create an empty table
    --no-key                        set a switch to false, or remove a table
    --key None                      set null
    --source.0.name x               set a key of a list entry

Invariant: nothing is guessed. Unknown keys, missing values and values of the wrong type are errors.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from harbortrainer.config.explain import nearest, without_indices
from harbortrainer.config.prime_rl_key_names import NEW, Release, newer_key, pinned_key
from harbortrainer.config.prime_rl_schema import NUMBERS, is_known, key_types, known_keys, type_error, types_of
from harbortrainer.config.table import TomlTable, with_value
from harbortrainer.errors import UserError, first_line, joined

OPTIONS = ("config", "engine", "resume", "dry_run")
SWITCH = {"true": True, "True": True, "1": True, "false": False, "False": False, "0": False}
FREE_TABLES = re.compile(r"\.(agent_kwargs|environment_kwargs)\.[^.]+$")
"""Tables with values of any type; text that looks like a number becomes a number."""

ALL_TASKS = {"num_examples": -1, "limit": "None"}
"""The value of the pinned and of the newer key that evaluates all tasks."""


@dataclass(frozen=True)
class Override:
    """One key set on the command line.

    Args:
        key: Dotted key; list entries are numbers.
        value: The new value.
        words: The command-line words of this override.
        typed: The key on the command line; None if it is `key`.
    """

    key: str
    value: object
    words: tuple[str, ...]
    typed: str | None = None

    @property
    def for_a_copy(self) -> bool:
        """Whether Prime-RL's own parser may refuse it: a list entry's key, `--key=value`, a list or a JSON table."""
        in_a_list = re.search(r"\.\d+\.", self.key) is not None
        json_table = isinstance(self.value, dict) and len(self.value) > 0
        return in_a_list or json_table or isinstance(self.value, list) or "=" in self.words[0]


def parse(arguments: Sequence[str]) -> list[Override]:
    """Parse command-line words into overrides, in order.

    Raises:
        UserError: Words belong to no option, keys are unknown, or values have the wrong type: all of them.
    """
    found: list[Override] = []
    errors: list[UserError] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or not word.strip("-"):
            do = "write overrides as --key value"
            errors.append(UserError(f"{word!r} belongs to no option", where="command line", do=do))
            continue
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else list(takewhile(lambda word: not word.startswith("--"), words))
        del words[: 0 if equals else len(values)]
        try:
            found.append(_override(name.replace("-", "_"), values, (word, *([] if equals else values))))
        except UserError as error:
            errors.append(error)
    if error := joined(errors):
        raise error
    return found


def apply(data: TomlTable, found: Sequence[Override]) -> TomlTable:
    """Return a copy of `data` with the overrides applied.

    Raises:
        UserError: A part of a key is not a table.
    """
    for override in found:
        try:
            data = with_value(data, override.key, override.value)
        except KeyError as error:
            key = override.typed or override.key
            raise _error(key, str(error.args[0]), "change the file instead") from None
    return data


def renamed(override: Override, release: Release) -> Override:
    """Return the override with the key name of a release; its words then are that release's too."""
    key = pinned_key(override.key) if release == "pin" else newer_key(override.key)
    if key == override.key:
        return override
    option, *text = override.words[0].split("=", 1)
    option = option.replace("_", "-").replace(flag(override.key)[2:], flag(key)[2:])
    value, words = override.value, ("=".join([option, *text]), *override.words[1:])
    old, new = override.key.rpartition(".")[2], key.rpartition(".")[2]
    if old in ALL_TASKS and value == ALL_TASKS[old]:
        value = ALL_TASKS[new]
        words = (f"{flag(key)}={value}",)
    return Override(key, value, words, typed=override.key)


def flag(key: str) -> str:
    """Return the option that sets a dotted key: `source[0].group_size` becomes `--source.0.group-size`."""
    return "--" + re.sub(r"\[(\d+)\]", r".\1", key).replace("_", "-")


def with_override_location(error: UserError, file: str, found: Sequence[Override]) -> UserError:
    """Return the error with the command line as its location if an override set the key."""
    key = error.where.removeprefix(f"{file}: ") if error.where.startswith(f"{file}: ") else None
    if key is None or (location := setting_location(file, key, found)) == error.where:
        return error
    do = re.sub(r"did you mean ([\w.\[\]]+)\?", lambda near: f"did you mean {flag(near[1])}?", error.do)
    return UserError(error.what, where=location, do="leave it out" if do == "remove it" else do)


def setting_location(file: str, key: str, found: Sequence[Override]) -> str:
    """Return where a key was set: the file or the command line; a table in the file may have overridden keys."""
    path = flag(key)
    for override in found:
        if f"{path}.".startswith(f"{flag(override.key)}."):
            return f"command line: {flag(override.typed or override.key)}{path[len(flag(override.key)) :]}"
    inside = [flag(one.typed or one.key) for one in found if flag(one.key).startswith(f"{path}.")]
    return f"{file}: {key}" + (f" with {' '.join(inside)}" if inside else "")


def _override(name: str, values: list[str], words: tuple[str, ...]) -> Override:
    off = name.removeprefix("no_") if not values and name.startswith("no_") else ""
    key = off or name
    plain = pinned_key(_without_numbers(key))
    if plain not in NEW and not is_known(plain):
        raise _unknown(key, plain)
    taken = NEW.get(plain) or types_of(plain)
    if off:
        value = _negated_value(key, taken)
    elif not values:
        value = _switch_value(key, taken)
    else:
        read = [_value(key, taken, text) for text in values]
        as_list = "list" in taken and not isinstance(read[0], list) and values != ["None"]
        if len(read) > 1 and not as_list and "any" not in taken:
            raise _error(key, f"takes one value, not {len(read)}", "quote it for the shell")
        value = read if as_list or len(read) > 1 else read[0]
    if what := type_error(plain, value):
        raise _error(key, what, "change the value")
    return Override(key, value, words)


def _negated_value(key: str, taken: frozenset[str]) -> object:
    if "bool" in taken:
        return False
    if taken == {"table", "none"}:
        return None
    do = "leave it out" if "table" in taken else f"write {flag(key)} VALUE"
    raise _error(key, "is neither a switch nor an optional table", do, no=True)


def _switch_value(key: str, taken: frozenset[str]) -> object:
    if "bool" in taken:
        return True
    if taken <= {"table", "none"}:
        return {}
    raise _error(key, "needs a value", f"write {flag(key)} VALUE")


def _value(key: str, taken: frozenset[str], text: str) -> object:
    """Convert a word to the key's type; a text value stays text."""
    if text.startswith("@"):
        raise _error(key, f"{text!r} would be read as a file by Prime-RL", "write the value itself")
    if text[:1] in ("[", "{"):
        return _json(key, text)
    if text == "None":
        return text
    if taken == {"bool"} or taken == {"bool", "none"}:
        if text not in SWITCH:
            raise _error(key, f"must be true or false, not {text!r}", "change the value")
        return SWITCH[text]
    if taken <= NUMBERS:
        return _number(key, text, whole="float" not in taken)
    if "any" in taken and FREE_TABLES.search(key):
        return _scalar(text)
    if "any" in taken and text.lstrip("+-").lower() in ("inf", "infinity", "nan"):
        raise _error(key, f"must be finite, not {text}", "change the value")
    return text


def _json(key: str, text: str) -> object:
    try:
        return _finite(json.loads(text))
    except json.JSONDecodeError as error:
        raise _error(key, f"not valid JSON ({error.msg})", "quote the value for the shell") from None
    except (ValueError, RecursionError) as error:
        raise _error(key, first_line(error), "change the value") from None


def _finite(value: object) -> object:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        _finite(item)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be finite, not {value}")
    return value


def _number(key: str, text: str, *, whole: bool) -> object:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        wanted = "an integer" if whole else "a number"
        raise _error(key, f"must be {wanted}, not {text!r}", "change the value") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise _error(key, f"must be finite, not {text}", "change the value")
    return value


def _scalar(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def _unknown(key: str, plain: str) -> UserError:
    known = [*known_keys(), *key_types(), *OPTIONS]
    near = nearest(plain, [name for name in known if not name.endswith(".*")])
    return _error(key, "no such key", f"did you mean {_numbered(near, key)}?" if near else "leave it out")


def _numbered(near: str, key: str) -> str:
    """Return the suggested key as an option, with the list indices of the original key."""
    for list_key, number in re.findall(r"((?:[\w]+\.)+)(\d+)\.", key):
        near = near.replace(list_key, f"{list_key}{number}.", 1)
    return flag(near)


def _without_numbers(key: str) -> str:
    return without_indices(re.sub(r"\.\d+(?=\.|$)", "", key))


def _error(key: str, what: str, do: str, *, no: bool = False) -> UserError:
    name = flag(key)
    return UserError(what, where=f"command line: {'--no-' + name[2:] if no else name}", do=do)
