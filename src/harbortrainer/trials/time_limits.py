"""Time limits of a task, and the longest possible trial of it.

The limits are read from a parsed `task.toml` without importing harbor; a test compares the defaults with Harbor's.
"""

from collections.abc import Mapping

from harbortrainer.config.table import TomlValue

BUILD_S, SETUP_S, VERIFIER_S = 600.0, 360.0, 600.0
SANDBOXES = 2
"""Sandboxes of a trial: the agent's and a separate verifier's."""

MARGIN_S = 300.0
"""Allowance for work without a timeout: file copies, sandbox removal, pauses between attempts, a busy machine."""


def agent_s(table: Mapping[str, object], override_s: float | None = None) -> float:
    """Time limit of a task's agent over all steps, in seconds; infinite without a timeout.

    Args:
        table: The parsed `task.toml`.
        override_s: Limit of each step, instead of the task's.
    """
    own = _timeout(table, "agent", "timeout_sec", float("inf"))
    return sum(override_s or _timeout(step, "agent", "timeout_sec", own) for step in _phases(table))


def trial_s(table: Mapping[str, object], override_s: float | None = None) -> float | None:
    """Longest duration of one trial in seconds, before any multiplier; None if the agent has no timeout.

    Args:
        table: The parsed `task.toml`.
        override_s: Limit of the agent in each step, instead of the task's.
    """
    build = SANDBOXES * _timeout(table, "environment", "build_timeout_sec", BUILD_S)
    # Harbor does not pass the task's verifier timeout on to its steps; each has its own or the default.
    verifier = sum(_timeout(step, "verifier", "timeout_sec", VERIFIER_S) for step in _phases(table))
    total = build + SETUP_S + agent_s(table, override_s) + verifier
    return total if total < float("inf") else None


def _phases(table: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return the steps of a task, or the task itself if it has no steps."""
    steps = table.get("steps")
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) and steps else [table]


def _timeout(table: Mapping[str, object], phase: str, key: str, default: float) -> float:
    part = table.get(phase)
    value: TomlValue = part.get(key) if isinstance(part, dict) else None
    try:
        return float(value)  # Harbor also takes a number in quotes
    except (TypeError, ValueError, OverflowError):
        return default
