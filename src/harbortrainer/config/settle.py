"""Settles the fate of each key of a run file for the embedded engine.

Contract: what comes back holds honoured keys only, with shared settings at the top; a refused key raises; the keys
that only Prime-RL's processes use are named. The argument is not changed.
"""

from typing import Any

from harbortrainer.config import keys
from harbortrainer.config.explain import without_indices
from harbortrainer.errors import UserError

# Tables that belong to verifiers, renderers, or us: kept as they are.
WHOLE = frozenset({"env", "serve", "renderer"})


def settle(data: dict[str, Any], file: str) -> tuple[dict[str, Any], list[str]]:
    """The honoured part of `data`, and the names of what is unused.

    Raises:
        UserError: A refused key, or a shared setting with two different values.
    """
    sorter = _Sorter(file)
    kept = sorter.table(data, "")
    for key, target, value in sorter.shared:
        _share(kept, target, value, where=f"{file}: {key}")
    return kept, list(dict.fromkeys(sorter.unused))


class _Sorter:
    """Walks the tables once and remembers what it took out."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.unused: list[str] = []
        self.shared: list[tuple[str, str, Any]] = []

    def table(self, data: dict[str, Any], prefix: str) -> dict[str, Any]:
        kept = {}
        for name, value in data.items():
            key = f"{prefix}{name}"
            keep, new = self.entry(name, key, value)
            if keep:
                kept[name] = new
        return kept

    def entry(self, name: str, key: str, value: Any) -> tuple[bool, Any]:
        """Whether the entry stays, and as what."""
        plain = without_indices(key)
        fate = keys.fate(plain)
        if fate == "refused":
            self.refuse(key, plain, value)
            return False, None
        if plain in keys.ONLY and value not in keys.ONLY[plain][0]:
            raise self.refusal(key, keys.ONLY[plain][1])
        if fate == "shared":
            if value is not None:
                self.shared.append((key, keys.SHARED[plain], value))
            return False, None
        if name in WHOLE or plain in keys.OURS:
            return True, value
        if isinstance(value, dict):
            return self.nested(key, fate, value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return True, [self.table(item, f"{key}[{index}].") for index, item in enumerate(value)]
        if fate == "unused":
            self.unused.append(str(keys.longest(plain, keys.UNUSED)))
        return fate == "honoured", value

    def nested(self, key: str, fate: str, value: dict[str, Any]) -> tuple[bool, Any]:
        before = len(self.shared)
        kept = self.table(value, f"{key}.")
        if fate == "unused" and not value:
            self.unused.append(str(keys.longest(without_indices(key), keys.UNUSED)))
        emptied = bool(value) and not kept and len(self.shared) > before
        return bool(kept) or (fate == "honoured" and not emptied), kept

    def refuse(self, key: str, plain: str, value: Any) -> None:
        refusal = keys.REFUSED[str(keys.longest(plain, keys.REFUSED))]
        if value is None or value in refusal.harmless:
            return
        raise self.refusal(key, refusal)

    def refusal(self, key: str, refusal: keys.Refusal) -> UserError:
        return UserError("not on the embedded engine", where=f"{self.file}: {key}", do=refusal.do)


def _share(data: dict[str, Any], target: str, value: Any, *, where: str) -> None:
    """Put a part's setting at the top, where the embedded engine reads it."""
    *tables, last = target.split(".")
    at = data
    for name in tables:
        at = at.setdefault(name, {})
    if at.get(last, value) != value:
        raise UserError(f"{value!r} is not what {target} says ({at[last]!r})", where=where, do="keep one of the two")
    at[last] = value
