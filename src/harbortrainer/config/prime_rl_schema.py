"""Keys of the pinned Prime-RL schema and our own: which exist, their value types, and the embedded engine's support.

Keys are looked up by dotted path without list indices (`orchestrator.train.source.ratio`).

- Support (`key_support.toml`): a key is supported, shared, unused or refused. The longest entry that equals the key or
  is a prefix of it decides; a key without an entry is supported by `RunConfig`. A test checks every key of the schema
  snapshot `prime_rl_keys.txt`.
- Value types: `bool`, `int`, `float`, `str`, `list`, `table`, `none`, or `any`. A value that pydantic would convert
  silently is refused: `true` for a number, an infinity, text for a table.
- Keys in the tables `env`, `serve` and `renderer` are checked by verifiers and renderers, except for our plugin's.
"""

import contextlib
import math
import re
import tomllib
import types
import typing
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from importlib import resources
from typing import Literal

from pydantic import BaseModel

from harbortrainer.config.explain import unknown_key, without_indices
from harbortrainer.config.plugin import HarnessKeys, TasksetKeys
from harbortrainer.config.prime_rl_key_names import NEW
from harbortrainer.config.run_sections import Prices, WarmupConfig
from harbortrainer.config.table import TomlTable, lookup, with_value
from harbortrainer.errors import UserError

NUMBERS = frozenset({"int", "float", "none"})


def value_types(annotation: object) -> frozenset[str]:
    """Return the value types of a field's annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, typing.TypeAliasType):
        return value_types(annotation.__value__)
    if origin is typing.Annotated:
        return value_types(arguments[0])
    if origin is typing.Literal:
        return _union(value_types(type(value)) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return _union(value_types(part) for part in arguments)
    kind = origin if isinstance(origin, type) else annotation
    return frozenset({_type_name(kind)})


def tables(annotation: object) -> list[type[BaseModel]]:
    """Return the table classes in an annotation, through unions, lists and Annotated, in order."""
    if typing.get_origin(annotation) is typing.Annotated:
        return tables(typing.get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        return [table for part in typing.get_args(annotation) for table in tables(part)]
    return []


def _type_name(kind: object) -> str:
    if kind is typing.Any or not isinstance(kind, type):
        return "any"
    if kind is type(None):
        return "none"
    for plain in (bool, int, float):
        if issubclass(kind, plain):
            return plain.__name__
    if issubclass(kind, BaseModel | dict):
        return "table"
    return "list" if issubclass(kind, list | tuple | set | frozenset) else "str"


def _union(parts: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*parts)


_KEY_SUPPORT = tomllib.loads(resources.files("harbortrainer.config").joinpath("key_support.toml").read_text())

UNUSED = frozenset(_KEY_SUPPORT["unused"])
"""Keys that only Prime-RL's own processes use."""

SUPPORTED = frozenset(_KEY_SUPPORT["supported"])
"""Supported keys in an unused table."""

SHARED: Mapping[str, str] = _KEY_SUPPORT["shared"]
"""Keys that Prime-RL accepts in several tables, with the one that the embedded engine reads."""

NEWER: Mapping[str, str] = _KEY_SUPPORT["newer"]
"""Keys of newer releases of Prime-RL that the embedded engine supports, with their value types."""


PINNED_LOSSES = ("default", "ipo", "custom")
"""Losses of Prime-RL at the pinned commit."""


@dataclass(frozen=True)
class Refusal:
    """A key that the embedded engine cannot support.

    Args:
        do: What the user should do instead.
        harmless: Accepted values, because they equal the embedded engine's behaviour.
    """

    do: str
    harmless: tuple[object, ...]


REFUSED = {
    key: Refusal(entry["do"], tuple(entry.get("harmless", ())))
    for entry in _KEY_SUPPORT["refused"]
    for key in entry["keys"]
}

OWN_KEYS = frozenset(
    {"inference.engine", "model.quantization", "prices", "seed", "tensorboard", "transcripts_mb", "warmup"}
)
"""Our own keys, which are never passed to Prime-RL."""

EXTERNAL_TABLES = frozenset({"env", "serve", "renderer"})
"""Names of tables of verifiers or renderers, whose own classes check the content."""


def longest(path: str, table: Container[str]) -> str:
    """Return the longest entry of `table` that equals `path` or is a prefix of it, or an empty string."""
    while path and path not in table:
        path = path.rpartition(".")[0]
    return path


def key_support(path: str) -> Literal["shared", "refused", "unused", "supported"]:
    """Return the embedded engine's support of a key; the longest matching entry decides."""
    if path in SHARED:
        return "shared"
    refused, unused = longest(path, REFUSED), longest(path, UNUSED)
    if path in SUPPORTED or refused == unused == "":
        return "supported"
    return "refused" if len(refused) > len(unused) else "unused"


SNAPSHOT = resources.files("harbortrainer.config").joinpath("prime_rl_keys.txt")
SOURCES = ("orchestrator.train.source", "orchestrator.eval.source")
LARGEST_INTEGER = 2**63 - 1
"""Largest integer of TOML."""

NONEMPTY_KEYS = ("name", "dir", "id")
ANY = frozenset({"any"})
TABLE = frozenset({"table"})


@cache
def key_types() -> dict[str, frozenset[str]]:
    """Return the value types of every key of Prime-RL and ours; `key.*` for a table with arbitrary keys."""
    lines = (line.split() for line in SNAPSHOT.read_text().splitlines())
    found = {key: frozenset(types.split(",")) for key, types in [*lines, *NEWER.items()]}
    found |= {"seed": frozenset({"int"}), "transcripts_mb": frozenset({"int"}), "warmup": frozenset({"table", "none"})}
    found |= {"tensorboard": frozenset({"bool"}), "prices": frozenset({"table", "none"})}
    found |= {"inference.engine": frozenset({"str"}), "model.quantization": frozenset({"str", "none"})}
    tables: dict[str, type[BaseModel]] = {"prices": Prices, "warmup": WarmupConfig}
    for source in SOURCES:
        found |= {f"{source}.env.{table}": TABLE for table in ("taskset", "agent", "agent.harness")}
        tables |= {f"{source}.env.taskset": TasksetKeys, f"{source}.env.agent.harness": HarnessKeys}
    for prefix, table in tables.items():
        found |= {f"{prefix}.{name}": value_types(field.annotation) for name, field in table.model_fields.items()}
    return found


@cache
def known_keys() -> tuple[str, ...]:
    """Return every dotted key of Prime-RL's schema and our own; `key.*` for a table with arbitrary keys."""
    snapshot = (line.split()[0] for line in SNAPSHOT.read_text().splitlines())
    return (*snapshot, *NEWER, *sorted(OWN_KEYS))


def types_of(key: str) -> frozenset[str]:
    """Return the value types of a key; `any` for an unknown key."""
    return key_types().get(without_indices(key), ANY)


def is_known(key: str) -> bool:
    """Return whether a key exists or is in a table with arbitrary keys."""
    plain = without_indices(key)
    known = known_keys()
    open_tables = OWN_KEYS | {key[:-2] for key in known if key.endswith(".*")}
    return plain in known or bool(longest(plain, open_tables))


@cache
def lists_of_tables() -> frozenset[str]:
    """Return the keys of lists whose entries are tables."""
    inside = {key.rpartition(".")[0] for key in known_keys()}
    return frozenset(key for key in inside if "list" in types_of(key))


def key_errors(data: TomlTable, file: str) -> Iterator[UserError]:
    """Yield an error for each unknown key, with the nearest existing one, and for each value of a wrong type."""
    unknown = [key for key, _ in _iterate(data) if not is_known(key)]
    for key in unknown:
        if without_indices(key) in NEW:
            do = "translate the file with `harbortrainer config upgrade FILE --to v0.9` first"
            what = "only files with the key names of newer Prime-RL have this key"
            yield UserError(what, where=f"{file}: {key}", do=do)
        elif not any(key.startswith((f"{table}.", f"{table}[")) for table in unknown):
            yield unknown_key(key, file, known_keys())
    for key, value in _iterate(data, foreign=True):
        if what := type_error(key, value):
            yield UserError(what, where=f"{file}: {key}", do="change the value")


def pin_errors(data: TomlTable, file: str) -> Iterator[UserError]:
    """Yield an error for each key that only newer releases of Prime-RL have, and for such a loss."""
    for key, _ in _iterate(data):
        if without_indices(key) in NEWER:
            older = next((old for old, new in SHARED.items() if new == key), "")
            do = f"set {older} instead" if older else "remove it"
            what = "Prime-RL has no such key at the pinned commit"
            yield UserError(what, where=f"{file}: {key}", do=f"{do}, or run with --engine local")
    loss = lookup(data, "trainer.loss.type", "default")
    if loss not in PINNED_LOSSES:
        what, do = f"Prime-RL has no loss {loss!r} at the pinned commit", f"set {', '.join(PINNED_LOSSES)}"
        yield UserError(what, where=f"{file}: trainer.loss.type", do=f"{do}, or run with --engine local")


def type_error(key: str, value: object) -> str:
    """Return what is wrong with the type of a value, or an empty string."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be finite, not {value}"
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return "is too large"
    if value == "" and key.rpartition(".")[2] in NONEMPTY_KEYS:
        return "must not be empty"
    taken = types_of(key)
    if "any" in taken or value is None or (value == "None" and "none" in taken) or key.endswith("]"):
        return ""
    if isinstance(value, bool):
        return "" if "bool" in taken else f"must be {_describe_types(taken)}, not {str(value).lower()}"
    if isinstance(value, dict):
        return "" if "table" in taken else f"must be {_describe_types(taken)}, not a table"
    if isinstance(value, list):
        if "list" not in taken:
            return f"must be {_describe_types(taken)}, not a list"
        tables = without_indices(key) in lists_of_tables()
        return "each entry must be a table" if tables and not all(isinstance(item, dict) for item in value) else ""
    if taken <= {"table", "list", "none"} or (taken <= {"str", "none"} and not isinstance(value, str | date)):
        return f"must be {_describe_types(taken)}, not {value!r}"
    if isinstance(value, str) and taken <= NUMBERS and _not_finite(value):
        return f"must be finite, not {value}"
    return ""


def _not_finite(text: str) -> bool:
    try:
        return not math.isfinite(float(text))
    except ValueError:
        return False


def _describe_types(taken: frozenset[str]) -> str:
    words = {"table": "a table", "list": "a list", "str": "a string", "int": "an integer", "float": "a number"}
    return " or ".join(words[kind] for kind in words if kind in taken) or "true or false"


def _iterate(data: TomlTable, prefix: str = "", *, foreign: bool = False) -> Iterator[tuple[str, object]]:
    """Yield every dotted key with its value, a table before its content; external tables only if `foreign`."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        yield key, value
        if not foreign and (name in EXTERNAL_TABLES or key in OWN_KEYS):
            continue
        for at, inner in _inside(key, value):
            if isinstance(inner, dict):
                yield from _iterate(inner, f"{at}.", foreign=foreign)
            elif foreign:
                yield at, inner


def _inside(key: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(key, value)]
    return [(f"{key}[{index}]", item) for index, item in enumerate(value)] if isinstance(value, list) else []


def supported_keys(data: TomlTable, file: str) -> tuple[TomlTable, list[str], list[UserError]]:
    """Return a copy of `data` with supported keys only, the names of unused keys, and the errors.

    Shared keys are moved to where the embedded engine reads them. An error is a refused key, or a shared key with two
    different values.
    """
    sorter = _KeyFilter(file)
    kept = sorter.table(data, "")
    for key, target, value in sorter.shared:
        other = lookup(kept, target, value)
        if other != value:
            what = f"{value!r} contradicts {target} = {other!r}"
            sorter.errors.append(UserError(what, where=f"{file}: {key}", do="keep one of the two"))
        with contextlib.suppress(KeyError):  # a parent is no table, which is an error of its own
            kept = with_value(kept, target, other)
    return kept, list(dict.fromkeys(sorter.unused)), sorter.errors


@dataclass
class _KeyFilter:
    """Filter for supported keys that records shared, unused and refused keys."""

    file: str
    unused: list[str] = field(default_factory=list)
    shared: list[tuple[str, str, object]] = field(default_factory=list)
    errors: list[UserError] = field(default_factory=list)

    def table(self, data: TomlTable, prefix: str) -> TomlTable:
        return {name: kept for name, value in data.items() for kept in self.entry(name, f"{prefix}{name}", value)}

    def entry(self, name: str, key: str, value: object) -> Iterator[object]:
        """Yield the supported part of an entry, if any."""
        plain = without_indices(key)
        match key_support(plain):
            case "refused":
                self.refuse(key, REFUSED[longest(plain, REFUSED)], value)
            case "shared":
                self.shared += [] if value is None else [(key, SHARED[plain], value)]
            case _ if name in EXTERNAL_TABLES or plain in OWN_KEYS:
                yield value
            case what if isinstance(value, dict):
                yield from self.nested(key, value, unused=what == "unused")
            case _ if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
                yield [self.table(item, f"{key}[{index}].") for index, item in enumerate(value)]
            case "supported":
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
            what = "not supported by the embedded engine"
            self.errors.append(UserError(what, where=f"{self.file}: {key}", do=refusal.do))


UNPARSED_MODELS = re.compile(r"Qwen/Qwen3-[\d.]+B(-A[\d.]+B)?(-FP8|-AWQ)?")
"""Qwen3 models that think but whose name the pinned Prime-RL maps to no reasoning parser."""


def needs_reasoning_parser(model: str) -> bool:
    """Return whether a model needs an explicit `[inference.vllm] reasoning_parser`."""
    return UNPARSED_MODELS.fullmatch(model) is not None
