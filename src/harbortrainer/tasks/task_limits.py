"""Time limits of a run's tasks: the agent's time, and the longest possible episode.

Contract: an episode that takes longer than `max_episode_s` is lost, not slow. `tasks_by_taskset` loads the tasks of a
run.
"""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.errors import UserError
from harbortrainer.tasks.measured_rates import filter_by_pass_rate
from harbortrainer.tasks.split import select_side
from harbortrainer.tasks.task_folder import TASK_FILE, TaskRef
from harbortrainer.tasks.task_store import is_available, load_source
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.sandbox_starts import GIVE_UP_S
from harbortrainer.trials.time_limits import MARGIN_S, agent_s, trial_s

ATTEMPTS = 1 + sum(outcome.retries for outcome in Outcome)
"""Most attempts of an episode: each retried outcome as often as it is retried."""


def max_episode_s(tasks_dir: Path, *, multiplier: float, episode_s: float | None = None) -> float | None:
    """Return the longest possible episode of any task in a folder, in seconds, including retries and a hold on starts.

    Args:
        tasks_dir: Folder with tasks at any depth, or one task.
        multiplier: `timeout_multiplier` of the harness.
        episode_s: `env.timeout.episode`, which limits every episode, waits included.

    Returns:
        None without a limit: an agent has no timeout, or there are no readable tasks.
    """
    tables = list(_tables(tasks_dir))
    trials = [trial_s(table) for table in tables]
    bounds = [None if one is None else one * multiplier * ATTEMPTS + GIVE_UP_S for one in trials]
    known = [bound for bound in bounds if bound is not None]
    if episode_s is not None:
        return min([episode_s, *([max(known)] if known and len(known) == len(bounds) else [])]) + MARGIN_S
    return max(known) + MARGIN_S if known and len(known) == len(bounds) else None


def _tables(tasks_dir: Path) -> Iterable[dict[str, object]]:
    """Yield every readable task.toml of a folder; loading the tasks reports the others."""
    one = tasks_dir / TASK_FILE
    for path in [one] if one.is_file() else sorted(tasks_dir.rglob(TASK_FILE)):
        try:
            yield tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            continue


def tasks_by_taskset(tasksets: Mapping[str, TasksetKeys]) -> dict[str, list[TaskRef]]:
    """Load the tasks of each taskset, by its key; each folder is read once.

    The list of a taskset is empty if its tasks cannot be read; another check reports that.
    """
    folders: dict[str, list[TaskRef]] = {}
    found: dict[str, list[TaskRef]] = {}
    for key, table in tasksets.items():
        folder = table.model_dump_json(include={"tasks_dir", "dataset", "include", "exclude"})
        try:
            if folder not in folders:
                folders[folder] = available_tasks(table)
            found[key] = filter_by_pass_rate(_checked(select_side(folders[folder], table), table), table)
        except UserError:
            found[key] = []
    return found


def _checked(tasks: list[TaskRef], table: TasksetKeys) -> list[TaskRef]:
    if not tasks or not (table.checked_only or table.audited):
        return tasks
    from harbortrainer.tasks.task_selection import checked_tasks  # slow to import

    return checked_tasks(tasks, table)


def available_tasks(table: TasksetKeys) -> list[TaskRef]:
    """Load all tasks of a taskset's source; none if it is not on this machine. Raises as `load_source`."""
    if not is_available(table.source):
        return []
    return load_source(table.source, table.include, table.exclude, skip=lambda error: None)


def agent_seconds(tasks: Iterable[TaskRef]) -> list[float]:
    """Time limit of each task's agent over all steps, in seconds before any multiplier; infinite without a timeout."""
    return [agent_s(task.config) for task in tasks]
