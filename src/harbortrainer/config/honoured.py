"""The honoured part of a run file: what the schema reads, after each key has met its fate.

Contract: what comes back holds honoured keys only, with shared settings at the top; a refused key raises; the keys
that only Prime-RL's processes use are named. The argument is not changed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from harbortrainer.config.explain import without_indices
from harbortrainer.config.fates import FOREIGN, OURS, REFUSED, SHARED, UNUSED, Refusal, fate, longest
from harbortrainer.config.table import TomlTable, changed, lookup
from harbortrainer.errors import UserError


def honoured(data: TomlTable, file: str) -> tuple[TomlTable, list[str]]:
    """The honoured part of `data`, and the names of what is unused.

    Raises:
        UserError: A refused key, or a shared setting with two different values.
    """
    sorter = _Sorter(file)
    kept = sorter.table(data, "")
    for key, target, value in sorter.shared:
        said = lookup(kept, target, value)
        if said != value:
            what = f"{value!r} is not what {target} says ({said!r})"
            raise UserError(what, where=f"{file}: {key}", do="keep one of the two")
        kept = changed(kept, target, value)
    return kept, list(dict.fromkeys(sorter.unused))


@dataclass
class _Sorter:
    """Walks the tables once and remembers what it took out."""

    file: str
    unused: list[str] = field(default_factory=list)
    shared: list[tuple[str, str, object]] = field(default_factory=list)

    def table(self, data: TomlTable, prefix: str) -> TomlTable:
        return {name: kept for name, value in data.items() for kept in self.entry(name, f"{prefix}{name}", value)}

    def entry(self, name: str, key: str, value: object) -> Iterator[object]:
        """What stays of an entry, if anything."""
        plain = without_indices(key)
        match fate(plain):
            case "refused":
                self.refuse(key, REFUSED[longest(plain, REFUSED)], value)
            case "shared":
                self.shared += [] if value is None else [(key, SHARED[plain], value)]
            case _ if name in FOREIGN or plain in OURS:
                yield value
            case what if isinstance(value, dict):
                yield from self.nested(key, value, unused=what == "unused")
            case _ if isinstance(value, list) and value and isinstance(value[0], dict):
                yield [self.table(item, f"{key}[{index}].") for index, item in enumerate(value)]
            case "honoured":
                yield value
            case "unused":
                self.unused.append(longest(plain, UNUSED))

    def nested(self, key: str, value: TomlTable, *, unused: bool) -> Iterator[TomlTable]:
        before = len(self.shared)
        kept = self.table(value, f"{key}.")
        if unused and not value:
            self.unused.append(longest(without_indices(key), UNUSED))
        if kept or not (unused or len(self.shared) > before):
            yield kept

    def refuse(self, key: str, refusal: Refusal, value: object) -> None:
        if value is not None and value not in refusal.harmless:
            raise UserError("not on the embedded engine", where=f"{self.file}: {key}", do=refusal.do)
