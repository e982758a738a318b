"""Tasks that the installed Harbor refuses in every sandbox, or refuses to let an agent play. Asks Harbor itself."""

from collections.abc import Iterable, Iterator, Mapping

from harbortrainer.config.agent_table import TRAINABLE_TERMINUS
from harbortrainer.doctor.finding import Finding, red
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.errors import UserError
from harbortrainer.runs.display import name_first
from harbortrainer.sandbox.task_requirements import TaskRequirements
from harbortrainer.tasks.task_errors import reading_task
from harbortrainer.tasks.task_folder import TaskRef


def refused_tasks(tasks: Iterable[TaskRef], agent: str = TRAINABLE_TERMINUS) -> dict[str, str]:
    """Return why the installed Harbor refuses to let an agent play a task, by its name. Imports a part of Harbor."""
    found = {}
    for task in tasks:
        try:
            with reading_task(task.name):
                requirements = TaskRequirements(task.path, task.config)
                found[task.name] = requirements.refusal() or requirements.trajectory_problem(agent)
        except UserError as error:
            found[task.name] = error.what
    return {name: reason for name, reason in found.items() if reason}


def check_refused(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that the installed Harbor accepts the tasks for their agents."""
    for source, env in plan.envs.items():
        key, harness = f"{source}.taskset", env.agent.harness
        if refused := refused_tasks(plan.tasks[key], harness.agent if harness else TRAINABLE_TERMINUS):
            yield refused_finding(
                refused, plan.where(f"{key}.{'tasks_dir' if env.taskset.dataset is None else 'dataset'}")
            )


def refused_finding(refused: Mapping[str, str], where: str) -> Finding:
    """Return the finding on tasks that Harbor refuses, by their names."""
    what = f"Harbor refuses {listed([f'{name} ({reason})' for name, reason in refused.items()])}"
    return red("tasks", what, "correct the files, or exclude the tasks by name", where)


def count_tasks(tasks: list[str]) -> str:
    """Return the number of tasks, in words."""
    return f"{len(tasks)} task{'s' * (len(tasks) > 1)}"


def listed(tasks: list[str]) -> str:
    """Return the number of tasks and the names of the first."""
    return f"{count_tasks(tasks)}: {name_first(tasks)}"
