"""Measured pass rate of each task: the file that `harbortrainer eval --difficulty` writes.

The file is one JSON object with `policy` (the policy that was measured) and `tasks` (by content key). Each task has its
name, graded attempts, pass rate and mean reward. Invariant: a changed task has another key and counts as unmeasured.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.errors import UserError
from harbortrainer.runs.durable import write_whole
from harbortrainer.tasks.task_folder import TaskRef


class MeasuredRate(BaseModel):
    """Measurement of one task."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str
    """Name of the task when it was measured; the key identifies it."""
    attempts: int = Field(ge=1)
    """Graded attempts."""
    pass_rate: float = Field(ge=0, le=1)
    """Share of the graded attempts with the full reward."""
    mean_reward: float
    """Mean reward of the graded attempts; difficulty pools compare their thresholds with it."""


class MeasuredRates(BaseModel):
    """Contents of a file of measured pass rates."""

    model_config = ConfigDict(extra="forbid")

    policy: str = ""
    """Description of the policy that was measured."""
    tasks: dict[str, MeasuredRate]
    """Measurements by content key."""


def read_rates(file: Path) -> MeasuredRates:
    """Read a file of measured pass rates. Raises `UserError` if it does not exist or is another kind of file."""
    do = "pass a file written by `harbortrainer eval --difficulty`"
    try:
        return MeasuredRates.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(file), do=do) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        what = f"not a file of measured pass rates ({f'{key}: ' if key else ''}{first['msg']})"
        raise UserError(what, where=str(file), do=do) from None


def write_rates(file: Path, rates: MeasuredRates) -> None:
    """Write the file atomically. Raises `UserError` if a file of another kind is there, which stays."""
    refuse_overwrite(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(rates.model_dump(), indent=1, sort_keys=True) + "\n")


def refuse_overwrite(file: Path) -> None:
    """Raise `UserError` if `file` exists and does not hold measured rates."""
    if file.exists():
        try:
            read_rates(file)
        except UserError as error:
            raise UserError(f"will not be overwritten ({error.what})", where=str(file), do="name a new file") from None


def filter_by_pass_rate(tasks: Sequence[TaskRef], table: TasksetKeys) -> list[TaskRef]:
    """Return the tasks whose measured pass rate is between a taskset's `min_pass_rate` and `max_pass_rate`.

    Without these keys, all tasks are returned; with either, unmeasured tasks are left out.

    Raises:
        UserError: The file cannot be read, or no task is left.
    """
    if table.difficulty is None or (table.min_pass_rate is None and table.max_pass_rate is None):
        return list(tasks)
    measured = read_rates(table.difficulty).tasks
    least, most = table.min_pass_rate or 0.0, 1.0 if table.max_pass_rate is None else table.max_pass_rate
    chosen = [task for task in tasks if task.key in measured and least <= measured[task.key].pass_rate <= most]
    if not chosen:
        unknown = len(unmeasured(tasks, measured))
        what = f"none of the {len(tasks)} tasks has a pass rate of {least:g} to {most:g} ({unknown} were not measured)"
        do = "change min_pass_rate or max_pass_rate, or measure the tasks again"
        raise UserError(what, where=str(table.difficulty), do=do)
    return chosen


def unmeasured(tasks: Sequence[TaskRef], measured: Mapping[str, MeasuredRate]) -> list[str]:
    """Names of the tasks whose current content was not measured."""
    return [task.name for task in tasks if task.key not in measured]
