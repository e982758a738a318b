"""How often each task was solved when it was measured: the file that `harbortrainer eval --difficulty` writes.

One JSON object: `policy`, what was measured with, and `tasks`, by the content key of each task: its name, how many
attempts were graded, the share that got the full reward, and their mean reward. Invariant: a task that was changed
since has another key, and counts as not measured.
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
    """What was measured of one task."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str
    """The task's name then; what counts is its key."""
    attempts: int = Field(ge=1)
    """Graded attempts."""
    pass_rate: float = Field(ge=0, le=1)
    """Share of them with the full reward."""
    mean_reward: float
    """Their mean reward: what the thresholds of a difficulty pool are compared with."""


class MeasuredRates(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid")

    policy: str = ""
    """What the tasks were measured with, in words."""
    tasks: dict[str, MeasuredRate]
    """By content key."""


def read_rates(file: Path) -> MeasuredRates:
    """What was measured. Raises `UserError` when there is no such file, or it is another kind of file."""
    do = "name a file that `harbortrainer eval --difficulty` wrote"
    try:
        return MeasuredRates.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(file), do=do) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        what = f"no file of measured pass rates ({f'{key}: ' if key else ''}{first['msg']})"
        raise UserError(what, where=str(file), do=do) from None


def write_rates(file: Path, rates: MeasuredRates) -> None:
    """Write the file, whole. Raises `UserError` where another kind of file lies, which stays."""
    refuse_foreign(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(rates.model_dump(), indent=1, sort_keys=True) + "\n")


def refuse_foreign(file: Path) -> None:
    """Raise `UserError` when something else than measured rates would be overwritten."""
    if file.exists():
        try:
            read_rates(file)
        except UserError as error:
            raise UserError(
                f"would be overwritten, and is {error.what}", where=str(file), do="name a new file"
            ) from None


def within_rates(tasks: Sequence[TaskRef], table: TasksetKeys) -> list[TaskRef]:
    """The tasks whose measured pass rate is between a taskset's `min_pass_rate` and `max_pass_rate`.

    Without these keys all of them; with one of them a task that was not measured is left out.

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
        do = "change min_pass_rate or max_pass_rate, or measure the tasks anew"
        raise UserError(what, where=str(table.difficulty), do=do)
    return chosen


def unmeasured(tasks: Sequence[TaskRef], measured: Mapping[str, MeasuredRate]) -> list[str]:
    """Names of the tasks that were not measured as they are now."""
    return [task.name for task in tasks if task.key not in measured]
