"""The longest that an episode may take: its task's own timeouts, in the one place where they are added up.

Contract: an episode that takes longer has been lost, not slow. Read from `task.toml` without importing harbor; the
defaults are Harbor's (a test compares them).
"""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from harbortrainer.tasks.task_folder import TASK_FILE
from harbortrainer.trials.outcome import Outcome

BUILD_S, SETUP_S, VERIFIER_S = 600.0, 360.0, 600.0
SANDBOXES = 2
"""The agent's, and that of a separate verifier."""

MARGIN_S = 300.0
"""For what has no timeout of its own: files copied, sandboxes taken down, pauses between attempts, a busy machine."""

ATTEMPTS = 1 + sum(outcome.retries for outcome in Outcome)
"""Every outcome that is retried, each as often as it is."""


def longest_episode_s(tasks_dir: Path, *, multiplier: float, episode_s: float | None = None) -> float | None:
    """Seconds that an episode of any task in a folder may take, retries included.

    Args:
        tasks_dir: Folder with tasks in it, at any depth, or one task.
        multiplier: `timeout_multiplier` of the harness.
        episode_s: `env.timeout.episode`, which ends an episode whatever its task says.

    Returns:
        None where nothing bounds it: a task whose agent has no timeout, or no tasks to read here.
    """
    tables = list(_tables(tasks_dir))
    bounds = [None if (one := _trial_s(table)) is None else one * multiplier * ATTEMPTS for table in tables]
    known = [bound for bound in bounds if bound is not None]
    if episode_s is not None:
        return min([episode_s, *([max(known)] if known and len(known) == len(bounds) else [])]) + MARGIN_S
    return max(known) + MARGIN_S if known and len(known) == len(bounds) else None


def agent_s(table: Mapping[str, object]) -> float:
    """Seconds that the agent of a task (its task.toml) has over all steps; infinite where it may work for ever."""
    own = _timeout(table, "agent", "timeout_sec", float("inf"))
    return sum(_timeout(step, "agent", "timeout_sec", own) for step in _phases(table))


def _trial_s(table: Mapping[str, object]) -> float | None:
    """Seconds of one trial's phases, none where the agent may work for ever."""
    total = SANDBOXES * _timeout(table, "environment", "build_timeout_sec", BUILD_S) + SETUP_S + agent_s(table)
    # A step has a verifier's time of its own, and Harbor's default where it says none.
    total += sum(_timeout(step, "verifier", "timeout_sec", VERIFIER_S) for step in _phases(table))
    return total if total < float("inf") else None


def _phases(table: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The steps of a task; the task itself where it has none."""
    steps = table.get("steps")
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) and steps else [table]


def _timeout(table: Mapping[str, object], phase: str, key: str, default: float) -> float:
    part = table.get(phase)
    value = part.get(key) if isinstance(part, dict) else None
    return float(value) if isinstance(value, int | float) else default


def _tables(tasks_dir: Path) -> Iterable[dict[str, object]]:
    """Every task.toml of a folder that can be read; what cannot is told elsewhere."""
    one = tasks_dir / TASK_FILE
    for path in [one] if one.is_file() else sorted(tasks_dir.rglob(TASK_FILE)):
        try:
            yield tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            continue
