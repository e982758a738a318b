"""Is this the same run? Two resolved configs are one run when they differ in nothing that changes the policy.

A longer run (`max_steps`), how often it is saved (`ckpt`) and what watches it (`monitors`) may change between
a start and its resume. Everything else decides what is learned from what.
"""

import tomllib
from typing import Any

MAY_CHANGE = ("max_steps", "ckpt", "monitors", "output_dir", "log", "orchestrator.concurrency")


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested table as dotted keys; lists of tables by index."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, dict):
            out |= flat(value, f"{path}.")
        else:
            out[path] = value
    return out


def decides(key: str) -> bool:
    """Whether a key takes part in a run's identity."""
    return not any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)


def first_difference(was: str, now: str) -> str | None:
    """The first key that makes two resolved configs (TOML) different runs, in words; None when they are one."""
    old, new = flat(tomllib.loads(was)), flat(tomllib.loads(now))
    for key in sorted(old.keys() | new.keys()):
        if decides(key) and old.get(key) != new.get(key):
            return f"{key} was {old.get(key, 'not set')!r} and is {new.get(key, 'not set')!r}"
    return None
