"""Values of a task.toml that make each of its trials fail.

- Numbers that no sandbox can use: time limits that are not above 0 and finite, and negative sizes. Harbor accepts them,
  and each environment type fails in another way, or drops the limit. Text and booleans count as the numbers that Harbor
  makes of them.
- A `task.name` without an organization, which Harbor refuses in each trial. It is a frequent error in public sets.

A missing key has Harbor's default and is not checked.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from harbortrainer.config.table import TomlTable, TomlValue
from harbortrainer.errors import UserError

_ABOVE_ZERO, _NOT_NEGATIVE = "finite and above 0", "finite and not negative"
_RULES: dict[str, dict[str, str]] = {
    "agent": {"timeout_sec": _ABOVE_ZERO},
    "verifier": {"timeout_sec": _ABOVE_ZERO},
    "collect": {"timeout_sec": _ABOVE_ZERO},
    "environment": {
        "build_timeout_sec": _ABOVE_ZERO,
        **dict.fromkeys(("cpus", "memory_mb", "storage_mb", "gpus", "memory", "storage"), _NOT_NEGATIVE),
    },
    "healthcheck": {
        "timeout_sec": _ABOVE_ZERO,
        **dict.fromkeys(("interval_sec", "start_period_sec", "start_interval_sec", "retries"), _NOT_NEGATIVE),
    },
}
"""What a number must be, by the name of its table and its key."""
_UNITS = ("G", "M", "K")
_ORGANIZATION_AND_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*\n?")
"""Harbor's pattern; `tests/tasks/test_task_values.py` compares them."""


def check_name(config: TomlTable, file: Path) -> None:
    """Raise `UserError` if Harbor refuses the `task.name` of a task.toml."""
    table = config.get("task")
    name = table.get("name") if isinstance(table, dict) else None
    if isinstance(name, str) and (".." in name or not _ORGANIZATION_AND_NAME.fullmatch(name)):
        what = f"{_shown(name)} is not ORGANIZATION/NAME, which Harbor requires"
        raise UserError(what, where=f"{file}: task.name", do="add an organization of letters and digits")


def check_values(config: TomlTable, file: Path) -> None:
    """Raise `UserError` with the keys of all bad numbers of a task.toml."""
    if bad := [f"{key} = {_shown(value)} must be {rule}" for key, value, rule in _bad_numbers(config, "")]:
        raise UserError("; ".join(bad), where=str(file), do="correct the numbers, or remove the keys")


def _bad_numbers(table: TomlTable, above: str) -> Iterator[tuple[str, TomlValue, str]]:
    """Yield each bad number with its dotted key and its rule."""
    for name, found in table.items():
        if name not in _RULES and name != "steps":
            continue
        for part in found if isinstance(found, list) else [found]:
            if isinstance(part, dict):
                key = f"{above}{name}.{part.get('name')}." if name == "steps" else f"{above}{name}."
                for own, rule in _RULES.get(name, {}).items():
                    if own in part and not _is_good(part[own], rule):
                        yield key + own, part[own], rule
                yield from _bad_numbers(part, key)


def _is_good(value: TomlValue, rule: str) -> bool:
    """Whether a value follows the rule; Harbor refuses what is no number at all, and names the key."""
    text = value.strip().upper() if isinstance(value, str) else ""
    try:
        number = float(text[:-1] if text.endswith(_UNITS) else text or value)
    except (TypeError, ValueError):
        return True
    except OverflowError:
        return False
    return math.isfinite(number) and (number > 0 if rule == _ABOVE_ZERO else number >= 0)


def _shown(value: TomlValue) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
