"""The doctor's checks for commands without a run file: sandboxes and model, before anything is built or downloaded.

Contract: a fault that concerns one task is that task's error; the others go on.
"""

from collections.abc import Iterable
from pathlib import Path

from harbortrainer.config.environment_table import environment_entry, unknown_type
from harbortrainer.doctor import credentials, docker_daemon, machine_checks, model_files
from harbortrainer.doctor.finding import error_of, red, red_ones, stop_on_red
from harbortrainer.errors import UserError
from harbortrainer.runs.display import loading
from harbortrainer.sandbox.environment_types import EnvironmentChoice
from harbortrainer.sandbox.task_requirements import TaskRequirements
from harbortrainer.tasks.task_folder import TaskRef


def check_type(environment_type: str) -> None:
    """Raise `UserError` for an unknown value of `--environment`."""
    if wrong := unknown_type(environment_type):
        raise UserError(wrong[0], where="--environment", do=wrong[1])


def refused_tasks(
    placed: Iterable[tuple[TaskRef, EnvironmentChoice, TaskRequirements]], where: str
) -> dict[str, UserError]:
    """Return why tasks cannot run in this machine's sandboxes, by name.

    Args:
        placed: Tasks with their environment and requirements.
        where: The option or key that selects the environment.

    Raises:
        UserError: None of the tasks can run.
    """
    placed = list(placed)
    refused = docker_daemon.refusals(placed, where)
    for kind in dict.fromkeys(choice.kind for _, choice, _ in placed):
        if error := _environment_error(kind, where):
            refused |= {task.name: error for task, choice, _ in placed if choice.kind == kind}
    if placed and len(refused) == len(placed):
        raise next(iter(refused.values()))
    return refused


def _environment_error(kind: str, where: str) -> UserError | None:
    """Return why no sandbox of a type can start here; None for Docker, whose needs differ by task."""
    entry = environment_entry(kind)
    if entry.needs_namespaces:
        reds = red_ones([machine_checks.local_sandbox(where)])
        return error_of(reds[0]) if reds else None
    if entry.remote and entry.import_path is None:
        with loading("Harbor", "harbor.environments.factory"):
            problem = credentials.provider_problem(kind)
        return UserError(problem, where=where, do=credentials.LOG_IN) if problem else None
    return None


def check_model(name: str, where: str) -> None:
    """Check a model's folder, or that the hub or its cache has it. An unreachable hub takes seconds.

    Raises:
        UserError: The model cannot be loaded.
    """
    folder = Path(name)
    if folder.is_dir():
        stop_on_red([model_files.in_folder(folder, where)])
    elif model_files.is_hub_id(name) or "/" not in name:
        stop_on_red([model_files.on_hub(name, where)])
    else:
        stop_on_red([red("model", f"no such folder: {name}", "pass a model folder or a hub id", where)])
