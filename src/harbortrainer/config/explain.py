"""Conversion of pydantic errors into one line: which key, what is wrong, what to do.

Contract: the message is one line. If several keys are wrong, it describes the first and counts the others.
"""

import difflib
import re
from collections.abc import Iterable, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from harbortrainer.errors import UserError

TAGS = frozenset(
    {"constant", "linear", "cosine", "adamw", "default", "static", "elastic", "server", "standard", "difficulty_pool"}
)
"""Union tags that pydantic puts into error locations; they are not keys of the file."""


def explain(error: ValidationError, file: str, *, prefix: str = "", known: Iterable[str] = ()) -> UserError:
    """Convert the first error to a `UserError`.

    Args:
        error: The validation error.
        file: The validated file.
        prefix: Dotted key of the validated table.
        known: Existing dotted keys, to suggest the nearest one for an unknown key.
    """
    errors = error.errors(include_url=False)
    first = errors[0]
    key = ".".join(part for part in (prefix, dotted(first["loc"])) if part)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if first["type"] == "extra_forbidden":
        return unknown_key(key, file, known, more)
    what, do = _message(first)
    return UserError(what + more, where=f"{file}: {key}" if key else file, do=do)


def unknown_key(key: str, file: str, known: Iterable[str], more: str = "") -> UserError:
    """Return the error for an unknown key, with the nearest existing key."""
    near = nearest(key, list(known))
    return UserError(f"no such key{more}", where=f"{file}: {key}", do=f"did you mean {near}?" if near else "remove it")


def nearest(key: str, known: Sequence[str]) -> str:
    """Return the existing dotted key most similar to `key`, or an empty string."""
    plain = without_indices(key)
    table, _, last = plain.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == table}
    names = difflib.get_close_matches(last, list(siblings), n=1, cutoff=0.6)
    if names:
        return siblings[names[0]]
    same_name = [k for k in known if k.rpartition(".")[2] == last]
    return (difflib.get_close_matches(plain, same_name or known, n=1, cutoff=0.6) or [""])[0]


def dotted(location: Sequence[int | str]) -> str:
    """Format `("source", 0, "env")` as `source[0].env`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if part not in TAGS)
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
    value = error.get("input")
    shown = f" (got {value!r})" if isinstance(value, str | int | float | bool) or value is None else ""
    return message[:1].lower() + message[1:] + shown, "change the value"
