"""Broken replies of a model server: seeded mutations of valid ones, such as missing fields or cut text."""

import copy
import json
import math
import random

WRONG = (
    None,
    True,
    "",
    "x",
    "5",
    -1,
    1.5,
    10**30,
    1e308,
    -1e308,
    math.nan,
    math.inf,
    -math.inf,
    [],
    {},
    [[]],
    {"a": 1},
    "\udc00",
)
"""What stands in the place of a value."""
DEEPER = 0.8
"""How likely a mutation lies one level further down."""


def mutated(reply: dict, seed: int) -> bytes:
    """Return the reply as bytes, with one fault chosen by `seed`."""
    chance = random.Random(seed)
    if chance.random() < 0.2:
        text = json.dumps(reply).encode()
        return chance.choice((_cut, _garbled))(text, chance)
    broken = copy.deepcopy(reply)
    chance.choice((_removed, _replaced, _replaced, _repeated))(*_place(broken, chance), chance)
    return json.dumps(broken).encode()


def _cut(text: bytes, chance: random.Random) -> bytes:
    return text[: chance.randrange(len(text))]


def _garbled(text: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(text))
    return text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]


def _place(value: dict | list, chance: random.Random) -> tuple[dict | list, str | int]:
    """Choose a container inside the reply, and one of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = chance.choice(keys)
    below = value[key]
    if isinstance(below, dict | list) and below and chance.random() < DEEPER:
        return _place(below, chance)
    return value, key


def _removed(where: dict | list, key: str | int, chance: random.Random) -> None:
    del where[key]  # ty: ignore[invalid-argument-type]


def _replaced(where: dict | list, key: str | int, chance: random.Random) -> None:
    where[key] = chance.choice(WRONG)  # ty: ignore[invalid-assignment]


def _repeated(where: dict | list, key: str | int, chance: random.Random) -> None:
    """Duplicate a list item, or rename an object's key."""
    if isinstance(where, list):
        where.insert(int(key), copy.deepcopy(where[int(key)]))
    else:
        where[f"{key}_"] = where.pop(str(key))
