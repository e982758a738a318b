"""Conversion of pydantic errors into one line each: which key, what is wrong, what to do."""

import difflib
import re
from collections.abc import Iterable, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from harbortrainer.errors import UserError, choice_advice, joined

TAGS = frozenset(
    {"constant", "linear", "cosine", "adamw", "default", "static", "elastic", "server", "standard", "difficulty_pool"}
)
"""Union tags that pydantic puts into error locations; they are not keys of the file."""
MEMBERS = re.compile(r"(int|float|str|bool|none)$|.*\[.*\]$")
"""Members of a union of plain types in error locations, such as `list[str]`."""


def explain(error: ValidationError, file: str, *, prefix: str = "", known: Iterable[str] = ()) -> UserError:
    """Convert a validation error to a `UserError` with a line for each wrong key.

    Args:
        error: The validation error.
        file: The validated file.
        prefix: Dotted key of the validated table.
        known: Existing dotted keys, to suggest the nearest one for an unknown key.
    """
    names = list(known)
    found = joined(_explain_one(one, file, prefix, names) for one in error.errors(include_url=False))
    assert found is not None
    return found


def _explain_one(error: ErrorDetails, file: str, prefix: str, known: Sequence[str]) -> UserError:
    key = ".".join(part for part in (prefix, dotted(error["loc"])) if part)
    if error["type"] == "extra_forbidden":
        return unknown_key(key, file, known)
    what, do = _message(error)
    return UserError(what, where=f"{file}: {key}" if key else file, do=do)


def unknown_key(key: str, file: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown key, with the nearest existing key."""
    near = nearest(key, list(known))
    return UserError("no such key", where=f"{file}: {key}", do=f"did you mean {near}?" if near else "remove it")


def nearest(key: str, known: Sequence[str]) -> str:
    """Return the existing dotted key most similar to `key`, or an empty string."""
    plain = without_indices(key)
    table, _, last = plain.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == table}
    names = difflib.get_close_matches(last, list(siblings), n=1, cutoff=0.6)
    if names:
        return siblings[names[0]]
    elsewhere = difflib.get_close_matches(last, {k.rpartition(".")[2] for k in known}, n=1, cutoff=0.75)
    same_name = [k for k in known if k.rpartition(".")[2] in elsewhere]
    return (difflib.get_close_matches(plain, same_name, n=1, cutoff=0.6) or [""])[0]


def dotted(location: Sequence[int | str]) -> str:
    """Format `("source", 0, "env")` as `source[0].env`."""
    names = location[:-1] if len(location) > 1 and MEMBERS.match(str(location[-1])) else location
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in names if part not in TAGS)
    return "".join(parts).removeprefix(".")


def without_indices(key: str) -> str:
    """Remove list indices: `source[0].env` becomes `source.env`."""
    return re.sub(r"\[\d+\]", "", key)


def _message(error: ErrorDetails) -> tuple[str, str]:
    if error["type"] == "missing":
        return "is missing", "add it"
    message = error["msg"].removeprefix("Value error, ").rstrip(".")
    what, _, do = message.partition("; ")
    if error["type"] == "value_error":
        return what.replace("\n", " "), do or "change it"
    if error["type"] in ("literal_error", "union_tag_invalid"):
        return _wrong_choice(error)
    value = error.get("input")
    shown = f" (got {value!r})" if isinstance(value, str | int | float | bool) or value is None else ""
    return message[:1].lower() + message[1:] + shown, "change the value"


def _wrong_choice(error: ErrorDetails) -> tuple[str, str]:
    """Return what is wrong with a value that is none of a few words, and the most similar word."""
    context = error.get("ctx", {})
    value = context.get("tag", error.get("input"))
    choices = re.findall(r"'([^']*)'", str(context.get("expected_tags", context.get("expected", ""))))
    what = f"{value!r} is not one of {', '.join(map(repr, choices))}"
    return what, choice_advice(str(value), choices, otherwise="change the value")
