"""Mutations of the shipped run files, and random overrides.

Contract: case `n` is deterministic, so that its number reproduces a failure.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harbortrainer.config.prime_rl_schema import key_types

CONFIGS = Path(__file__).parents[2] / "configs"
OLD = """
trainer_gpu_ids = [1]
inference_gpu_ids = [0]
[trainer.model.lora]
[orchestrator]
batch_size = 8
rollouts_per_example = 4
[[orchestrator.env]]
id = "harbor_env"
args = { tasks_dir = "datasets/harbor_tasks", environment_type = "local", n_parallel_envs = 8, max_turns = 20 }
[orchestrator.sampling]
max_tokens = 64
"""
VALUES = (
    *("", " ", "None", "true", "false", "0", "-1", "1.5", "1e400", "inf", "-inf", "nan", "x", "../x", "/", "\\", "é"),
    *("[]", "{}", "[1]", '[""]', '{"a": 1}', '{"id": null}', "[[[]]]", '"', "'", "=", "@", "@x.toml", "9" * 400, "\t"),
    *("1979-05-27", "0x10", "1_000", "+5", "٣", "a,b", "harbor_env", "local", "*", "..", ".hidden", "None.None"),
)
TOML_VALUES = (
    *("inf", "-inf", "nan", "true", "false", '""', "[]", "{}", "-1", "0", "1e300", '"x"', "'None'", '[""]', "[{}]"),
    *("1979-05-27", "07:32:00", '"../x"', "[1, 'a']", "{ id = 5 }", "9223372036854775807", '"\\u0000"', "[[]]", "1.5"),
)


@dataclass(frozen=True)
class Case:
    """A run file and command-line words."""

    text: str
    words: list[str]


def case(number: int) -> Case:
    """Return the case with this number."""
    dice = random.Random(number)
    sources = [path.read_text() for path in sorted(CONFIGS.glob("*.toml"))] + [OLD]
    text = dice.choice(sources)
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
        text = dice.choice(BREAKS)(text, dice)
    words = [word for _ in range(dice.choice((0, 0, 1, 2))) for word in override(dice)]
    return Case(text, words)


def override(dice: random.Random) -> list[str]:
    """Return the words of one override with a possibly mutated key and a possibly invalid value."""
    key = dice.choice(sorted(key_types())).replace("*", "x")
    if dice.random() < 0.3:
        key = key.replace("source.", f"source.{dice.choice('0019')}.")
    if dice.random() < 0.2:
        key = garbled(key, dice)
    word = ("--no-" if dice.random() < 0.1 else "--") + key.replace("_", dice.choice("_-"))
    values = [dice.choice(VALUES) for _ in range(dice.choice((0, 1, 1, 1, 2)))]
    return [f"{word}={values[0]}"] if values and dice.random() < 0.3 else [word, *values]


def garbled(text: str, dice: random.Random) -> str:
    """Insert, delete or replace one character."""
    if not text:
        return "x"
    at = dice.randrange(len(text))
    return text[:at] + dice.choice(("", "x", ".", "..", "-", "[0]", text[at] * 2)) + text[at + 1 :]


def _another_value(text: str, dice: random.Random) -> str:
    lines = text.splitlines()
    at = dice.choice([index for index, line in enumerate(lines) if "=" in line] or [0])
    key = lines[at].partition("=")[0]
    lines[at] = f"{key}= {dice.choice(TOML_VALUES)}"
    return "\n".join(lines)


def _inner_value(text: str, dice: random.Random) -> str:
    found = list(re.finditer(r"(?<== )(\"[^\"]*\"|[\d.]+|true|false)(?=[ ,}\n])", text))
    if not found:
        return text
    spot = dice.choice(found)
    return text[: spot.start()] + dice.choice(TOML_VALUES) + text[spot.end() :]


def _another_key(text: str, dice: random.Random) -> str:
    found = list(re.finditer(r"\b[a-z_]+(?= =)", text))
    if not found:
        return text
    spot = dice.choice(found)
    return text[: spot.start()] + garbled(spot[0], dice) + text[spot.end() :]


def _another_table(text: str, dice: random.Random) -> str:
    lines = text.splitlines()
    at = dice.choice([index for index, line in enumerate(lines) if line.startswith("[")] or [0])
    key = dice.choice(sorted(key_types())).removesuffix(".*")
    lines[at] = dice.choice((f"[{key}]", f"[[{key}]]", garbled(lines[at], dice), f"[[{lines[at].strip('[]')}]]"))
    return "\n".join(lines)


def _a_line_less(text: str, dice: random.Random) -> str:
    lines = text.splitlines()
    del lines[dice.randrange(len(lines)) if lines else 0 :][:1]
    return "\n".join(lines[:-1] if dice.random() < 0.1 else lines)


def _a_line_moved(text: str, dice: random.Random) -> str:
    lines = text.splitlines()
    line = lines.pop(dice.randrange(len(lines)))
    lines.insert(dice.randrange(len(lines) + 1), line)
    return "\n".join(lines)


def _a_line_more(text: str, dice: random.Random) -> str:
    key = dice.choice(sorted(key_types())).replace("*", "x")
    return f"{key} = {dice.choice(TOML_VALUES)}\n{text}"


def _a_character(text: str, dice: random.Random) -> str:
    at = dice.randrange(len(text) + 1)
    return text[:at] + dice.choice('"{}[]=,#\n\x00\ufeff\\') + text[at:]


def _cut(text: str, dice: random.Random) -> str:
    return text[: dice.randrange(len(text) + 1)]


BREAKS: tuple[Callable[[str, random.Random], str], ...] = (
    *(_another_value, _another_value, _inner_value, _inner_value, _another_key, _another_table, _a_line_less),
    *(_a_line_moved, _a_line_more, _a_character, _cut),
)
