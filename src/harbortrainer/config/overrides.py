"""Overrides on the command line, as Prime-RL's: `--trainer.optim.lr 1e-5 --clean --no-ckpt`.

Contract: dashes in a key stand for underscores; `--key value` and `--key=value` are the same, several values make a
list, a value that starts with `[` or `{` is JSON, `None` is null. A key without a value is a switch or a table, and
`--no-key` turns one off. An entry of a list is named by its number: `--orchestrator.train.source.0.name x`.
Invariant: nothing is guessed. A key that does not exist, a number without a value, and a value that is no number where
one must stand are refused, with the words as they were written.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from harbortrainer.config.explain import nearest, without_indices
from harbortrainer.config.kinds import NUMBERS
from harbortrainer.config.known_keys import is_known, key_kinds, kinds_of, known_keys, wrong
from harbortrainer.config.table import TomlTable, changed
from harbortrainer.errors import UserError

OPTIONS = ("config", "engine", "resume", "dry_run")
SWITCH = {"true": True, "True": True, "1": True, "false": False, "False": False, "0": False}
FREE_TABLES = re.compile(r"\.(agent_kwargs|environment_kwargs)\.[^.]+$")
"""Tables of ours whose values may be anything: a number stays a number there."""


@dataclass(frozen=True)
class Override:
    """One key that the command line changes.

    Args:
        key: Its dotted path; entries of lists by their number.
        value: What it becomes.
        words: The words that said so.
    """

    key: str
    value: object
    words: tuple[str, ...]

    @property
    def in_a_list(self) -> bool:
        """Whether it changes an entry of a list, which Prime-RL's own parser cannot do."""
        return re.search(r"\.\d+\.", self.key) is not None


def parse(arguments: Sequence[str]) -> list[Override]:
    """Read command-line words, in their order.

    Raises:
        UserError: A word that belongs to no key, a key that does not exist, or a value that it cannot take.
    """
    found: list[Override] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or not word.strip("-"):
            raise UserError(f"{word!r} belongs to no option", where="command line", do="write overrides as --key value")
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else list(takewhile(lambda word: not word.startswith("--"), words))
        del words[: 0 if equals else len(values)]
        found.append(_override(name.replace("-", "_"), values, (word, *([] if equals else values))))
    return found


def apply(data: TomlTable, found: Sequence[Override]) -> TomlTable:
    """A copy of `data` with each override in its place.

    Raises:
        UserError: A key that goes through something that is not a table.
    """
    for override in found:
        try:
            data = changed(data, override.key, override.value)
        except KeyError as error:
            raise _refused(override.key, str(error.args[0]), "change the file instead") from None
    return data


def flag(key: str) -> str:
    """A dotted key as the option that sets it: `source[0].group_size` is `--source.0.group-size`."""
    return "--" + re.sub(r"\[(\d+)\]", r".\1", key).replace("_", "-")


def blamed(error: UserError, file: str, found: Sequence[Override]) -> UserError:
    """The error, told of the command line when that set the key which it is about."""
    about = error.where.removeprefix(f"{file}: ") if error.where.startswith(f"{file}: ") else None
    if about is None or (said := place(file, about, found)) == error.where:
        return error
    do = re.sub(r"did you mean ([\w.\[\]]+)\?", lambda near: f"did you mean {flag(near[1])}?", error.do)
    return UserError(error.what, where=said, do="leave it out" if do == "remove it" else do)


def place(file: str, key: str, found: Sequence[Override]) -> str:
    """Where a key was set: in the file, or on the command line, which may also have set something in that table."""
    path = flag(key)
    for override in found:
        if f"{path}.".startswith(f"{flag(override.key)}."):
            return f"command line: {path}"
    inside = [flag(override.key) for override in found if flag(override.key).startswith(f"{path}.")]
    return f"{file}: {key}" + (f" with {' '.join(inside)}" if inside else "")


def _override(name: str, values: list[str], words: tuple[str, ...]) -> Override:
    off = name.removeprefix("no_") if not values and name.startswith("no_") else ""
    key = off or name
    plain = _without_numbers(key)
    if not is_known(plain):
        raise _unknown(key, plain)
    taken = kinds_of(plain)
    if off:
        value = _turned_off(key, taken)
    elif not values:
        value = _alone(key, taken)
    else:
        read = [_value(key, taken, text) for text in values]
        as_list = "list" in taken and not isinstance(read[0], list) and values != ["None"]
        if len(read) > 1 and not as_list and "any" not in taken:
            raise _refused(key, f"takes one value, not {len(read)}", "quote it for the shell")
        value = read if as_list or len(read) > 1 else read[0]
    if what := wrong(plain, value):
        raise _refused(key, what, "change the value")
    return Override(key, value, words)


def _turned_off(key: str, taken: frozenset[str]) -> object:
    if "bool" in taken:
        return False
    if taken == {"table", "none"}:
        return None
    do = "leave it out" if "table" in taken else f"write {flag(key)} VALUE"
    raise _refused(key, "is no switch and no table that can be left out", do, no=True)


def _alone(key: str, taken: frozenset[str]) -> object:
    if "bool" in taken:
        return True
    if taken <= {"table", "none"}:
        return {}
    raise _refused(key, "needs a value", f"write {flag(key)} VALUE")


def _value(key: str, taken: frozenset[str], text: str) -> object:
    """A word as its key takes it; what is text to the schema stays text."""
    if text.startswith("@"):
        raise _refused(key, f"{text!r} would be read as a file by Prime-RL's command", "write the value itself")
    if text[:1] in ("[", "{"):
        return _json(key, text)
    if text == "None":
        return text
    if taken == {"bool"} or taken == {"bool", "none"}:
        if text not in SWITCH:
            raise _refused(key, f"must be true or false, not {text!r}", "change the value")
        return SWITCH[text]
    if taken <= NUMBERS:
        return _number(key, text, whole="float" not in taken)
    if "any" in taken and FREE_TABLES.search(key):
        return _scalar(text)
    if "any" in taken and text.lstrip("+-").lower() in ("inf", "infinity", "nan"):
        raise _refused(key, f"must be finite, not {text}", "change the value")
    return text


def _json(key: str, text: str) -> object:
    try:
        return _finite(json.loads(text))
    except json.JSONDecodeError as error:
        raise _refused(key, f"not valid JSON ({error.msg})", "quote the value for the shell") from None
    except (ValueError, RecursionError) as error:
        raise _refused(key, str(error).splitlines()[0], "change the value") from None


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
        wanted = "a whole number" if whole else "a number"
        raise _refused(key, f"must be {wanted}, not {text!r}", "change the value") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise _refused(key, f"must be finite, not {text}", "change the value")
    return value


def _scalar(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def _unknown(key: str, plain: str) -> UserError:
    known = [*known_keys(), *key_kinds(), *OPTIONS]
    near = nearest(plain, [name for name in known if not name.endswith(".*")])
    return _refused(key, "no such key", f"did you mean {_numbered(near, key)}?" if near else "leave it out")


def _numbered(near: str, key: str) -> str:
    """The proposed key as an option, with the numbers that the key as it was written has."""
    for list_key, number in re.findall(r"((?:[\w]+\.)+)(\d+)\.", key):
        near = near.replace(list_key, f"{list_key}{number}.", 1)
    return flag(near)


def _without_numbers(key: str) -> str:
    return without_indices(re.sub(r"\.\d+(?=\.|$)", "", key))


def _refused(key: str, what: str, do: str, *, no: bool = False) -> UserError:
    name = flag(key)
    return UserError(what, where=f"command line: {'--no-' + name[2:] if no else name}", do=do)
