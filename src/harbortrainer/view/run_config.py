"""The config of a run or evaluation as the pages show it: flat, without secrets and local paths.

Contract: a damaged or missing file is an empty config, because the pages of a run must not depend on it. Pure, except
for `toml_config`, which reads.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harbortrainer.config.redacted_config import redact
from harbortrainer.runs.folder import flat

type FlatConfig = Mapping[str, object]
"""Values by dotted key, e.g. `trainer.optim.lr`."""

NAMES = ("output_dir", "run.name", "run.dir")
"""Keys that only name a run."""
CARD_KEYS = (
    *("model.name", "max_steps", "batch_size", "group_size", "attempts", "seq_len", "max_model_len", "seed"),
    *("optim.lr", "lora.rank", "loss.type", "algo.type", "max_off_policy_steps", "max_inflight"),
    *("temperature", "max_completion_tokens", "max_turns", "harness.agent"),
    *("environment_type", "tasks_dir"),
)
"""Ends of the keys on the configuration card, in its order."""


def toml_config(*files: Path) -> FlatConfig:
    """Return the flat config of TOML files; with several files, keys begin with the name of their file."""
    found: dict[str, object] = {}
    for file in files:
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        found |= flat(redact(table), f"{file.stem}." if len(files) > 1 else "")
    return found


def value_of(config: FlatConfig, end: str) -> object:
    """Return the value of the first key that is `end` or ends with it after a dot; None if there is none."""
    return next((value for key, value in config.items() if f".{key}".endswith(f".{end}")), None)


@dataclass(frozen=True, slots=True)
class EvalSchedule:
    """When a run evaluates."""

    intervals: Sequence[int]
    """The interval of each source in steps."""

    def due_after(self, step: int, last: int | None) -> bool:
        """Return whether an evaluation is due after a step; one is always due before the first and after the last."""
        return step in (0, last) or any(step % interval == 0 for interval in self.intervals)


def eval_schedule(config: FlatConfig) -> EvalSchedule | None:
    """Return when the run evaluates; None without an evaluation."""
    if not any(".orchestrator.eval." in f".{key}" for key in config):
        return None
    intervals = [value for key, value in config.items() if ".eval." in key and key.endswith(".interval")]
    return EvalSchedule([value for value in intervals if isinstance(value, int) and value > 0])


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One key of the configuration card or of a difference."""

    key: str
    values: Sequence[str]
    """The value of each run; empty where it is not set."""


def config_card(config: FlatConfig) -> list[ConfigEntry]:
    """Return the entries that describe a run at a glance."""
    found = [(end, value_of(config, end)) for end in CARD_KEYS]
    return [ConfigEntry(end, [shown(value)]) for end, value in found if value is not None]


def differences(configs: Sequence[FlatConfig]) -> list[ConfigEntry]:
    """Return the keys in which configs differ, without the names of the runs."""
    keys = sorted({key for config in configs for key in config} - set(NAMES))
    return [
        ConfigEntry(key, [shown(config.get(key)) for config in configs])
        for key in keys
        if not all_equal(config.get(key) for config in configs)
    ]


def all_equal(values: Iterable[object]) -> bool:
    """Return whether all values are equal."""
    first, *others = values
    return all(other == first for other in others)


def shown(value: object) -> str:
    """Format a value as in TOML, without the quotes of text; empty for a missing one."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
