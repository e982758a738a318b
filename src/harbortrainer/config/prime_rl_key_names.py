"""Key names of the pinned Prime-RL and of newer releases: which key has which name, and which release a file has.

Source: Prime-RL of October 2026, `packages/prime-rl-configs/src/prime_rl/configs/{orchestrator,trainer}.py`, whose
renamed keys have no aliases. "v0.9" are the names of September 2026 on, which release 0.9.0 of August does not have.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from harbortrainer.config.table import TomlTable, lookup

type Release = Literal["pin", "v0.9"]

TRAIN, EVAL = "orchestrator.train", "orchestrator.eval"
CONSTANT = "orchestrator.constant_trainer_batch_size"
MOVED = {
    "orchestrator.train.algo": "orchestrator.algo",
    "orchestrator.train.group_size": "orchestrator.group_size",
}
RENAMED = MOVED | {
    "orchestrator.train.source.sampler": "orchestrator.train.source.curriculum.sampler",
    "orchestrator.eval.select.limit": "orchestrator.eval.num_examples",
    "orchestrator.eval.source.select.limit": "orchestrator.eval.source.num_examples",
}
"""The pinned name of each renamed key or table, without list indices."""

INDEX = re.compile(r"(orchestrator\.(?:train|eval)\.source)(\[\d+\]|\.\d+)\.(.+)")
"""A key of a source, with its index."""

NEW = {
    CONSTANT: frozenset({"bool"}),
    "orchestrator.train.sampling.top_p": frozenset({"float"}),
    "orchestrator.train.sampling.top_k": frozenset({"int", "none"}),
    "orchestrator.train.source.min_abs_advantage": frozenset({"float"}),
}
"""Newer keys without an older name, with their value types."""

GROUP_TABLES = ("env", "select")
"""Tables that the sources inherit from `[orchestrator.train]` and `[orchestrator.eval]`, key by key."""

NEWER_TABLES = tuple(f"{group}.{table}" for group in (TRAIN, EVAL) for table in GROUP_TABLES)
OLDER = {
    "orchestrator.algo": "use orchestrator.train.algo",
    "orchestrator.group_size": "use orchestrator.train.group_size",
    "orchestrator.token_batch_size": "use orchestrator.batch_size",
    "orchestrator.train.filter_zero_advantages": f"use {CONSTANT}",
    "orchestrator.train.source.curriculum": f"use sampler and {CONSTANT}",
    "orchestrator.eval.num_examples": "use select.limit",
    "orchestrator.eval.source.num_examples": "use select.limit",
    "trainer.loss.ipo_threshold": "use trainer.loss.eps",
    "trainer.loss.kl_tau": "remove it: newer releases have no KL term",
}
"""Keys that only the pinned commit has, and what to do in a newer file."""

DROPPED = (
    "orchestrator.env_server_base_port",
    "orchestrator.model.lora.name",
    "trainer.enable_token_export",
)
"""Keys of the pinned commit that newer releases do not need."""

OLDER_SIGNS = (*OLDER, *DROPPED, "trainer.loss.dppo_mask_low", "trainer.loss.dppo_mask_high")
"""Keys that newer releases do not have. The loss `default` is such a value."""

NEWER_LOSSES = ("icepop", "ppo", "cispo")
NEWER_LOSS_KEYS = ("trainer.loss.eps", "trainer.loss.score_centering")
"""Losses and their keys that Prime-RL has in newer releases only. The embedded engine has them beside pinned keys too,
so they tell the release only of a file without keys of the pinned one."""


def pinned_key(key: str) -> str:
    """Return the pinned name of a key; an index of a list stays (`source[0].` or `source.0.`).

    Example:
        >>> pinned_key("orchestrator.train.algo.type")
        'orchestrator.algo.type'
    """
    return _renamed(key, RENAMED)


def newer_key(key: str) -> str:
    """Return the name of a pinned key in newer releases.

    Example:
        >>> newer_key("orchestrator.eval.source[2].num_examples")
        'orchestrator.eval.source[2].select.limit'
    """
    return _renamed(key, {old: new for new, old in RENAMED.items()})


def _renamed(key: str, names: Mapping[str, str]) -> str:
    index = INDEX.match(key)
    plain = key if index is None else f"{index[1]}.{index[3]}"
    prefix = next((name for name in names if f"{plain}.".startswith(f"{name}.")), "")
    renamed = names[prefix] + plain[len(prefix) :] if prefix else plain
    return renamed if index is None else f"{index[1]}{index[2]}.{renamed[len(index[1]) + 1 :]}"


def release_of(data: TomlTable) -> Release | None:
    """Return the release whose keys a run file has; None if its keys do not tell."""
    if any(_newer_keys(data)):
        return "v0.9"
    if lookup(data, "trainer.loss.type") == "default" or any(_set_keys(data, OLDER_SIGNS)):
        return "pin"
    return "v0.9" if newer_value(data) else None


def newer_value(data: TomlTable) -> str:
    """Return the key that alone tells that a file is of a newer release; empty if other keys tell it, or none does."""
    if any(_set_keys(data, OLDER_SIGNS)) or any(_newer_keys(data)):
        return ""
    if lookup(data, "trainer.loss.type") in NEWER_LOSSES:
        return "trainer.loss.type"
    if lookup(data, "trainer.optim.weight_decay") == "auto":
        return "trainer.optim.weight_decay"
    return next(_set_keys(data, NEWER_LOSS_KEYS), "")


def _set_keys(data: TomlTable, keys: Iterable[str]) -> Iterator[str]:
    for key in keys:
        yield from where_set(data, key)


def _newer_keys(data: TomlTable) -> Iterator[str]:
    yield from _set_keys(data, [*RENAMED, *NEW, *NEWER_TABLES, f"{TRAIN}.source.select", f"{EVAL}.source.select"])


def where_set(data: TomlTable, key: str) -> Iterator[str]:
    """Yield a key if it is set; for a key of sources, yield it for each source that sets it."""
    group, found, name = key.partition(".source.")
    if not found:
        if lookup(data, key) is not None:
            yield key
        return
    for index, source in enumerate(sources_in(data, group)):
        if lookup(source, name) is not None:
            yield f"{group}.source[{index}].{name}"


def sources_in(data: TomlTable, group: str) -> list[TomlTable]:
    """Return the tables of the sources of a group."""
    sources = lookup(data, f"{group}.source")
    return [one for one in sources if isinstance(one, dict)] if isinstance(sources, list) else []
