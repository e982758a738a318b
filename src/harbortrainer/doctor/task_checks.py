"""Checks of a run's tasks and agents: task requirements, train/eval contamination, agent names.

- Requirements: what a task needs that its sandbox does not support, what a sandbox exposes, where `auto` runs tasks.
- Contamination: whether evaluation tasks are training tasks or near copies, and whether a side of a split is empty.
- Agent names: whether the installed Harbor has the agent. A class of the user's is checked by its first trial.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from harbortrainer.config.agent_table import SHORT_NAMES, TRAINABLE_TERMINUS, is_class
from harbortrainer.config.environment_table import environment_entry
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.trusted_tasks import HARNESS_TABLE, is_trusted, trust_remedy
from harbortrainer.doctor.finding import Finding, green, red, stop_on_red, warn, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.doctor.refused_tasks import count_tasks, listed, refused_finding, refused_tasks
from harbortrainer.engines.prime_rl.checkout import dotenv
from harbortrainer.errors import UserError
from harbortrainer.runs.display import name_first
from harbortrainer.sandbox import network_choice
from harbortrainer.sandbox.environment_types import choose_environment, unsupported_remedy
from harbortrainer.sandbox.task_requirements import TaskRequirements
from harbortrainer.tasks.ignored_keys import ignored_keys
from harbortrainer.tasks.near_duplicates import CopyPair, overlap
from harbortrainer.tasks.split import select_side
from harbortrainer.tasks.task_errors import reading_task
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_limits import available_tasks
from harbortrainer.warmup.tasks_with_solution import tasks_with_solution

_SET_VARIABLES = "export them, or add them to .env"
_ACCEPT_HOST_NETWORK = "or accept it: environment_kwargs = { network = 'host' }"
_SEPARATE_NETWORKS = (
    'set network_mode = "no-network" in task.toml if the task needs no network, or use environment_type = "docker"'
)
_REACHABLE_ADDRESS = (
    "use an address of this machine that a sandbox can reach, or environment_kwargs = { network = 'host' } in local"
)
_CORRECT_KEYS = "correct the keys, or move notes to [metadata]"
_TRUSTED = "the agent has this access too; remove the tasks from the trusted ones if it need not"


@dataclass(frozen=True)
class TaskReport:
    """Results of inspecting a set of tasks. Each entry of a list is a task's name, with details in parentheses."""

    placements: dict[str, list[str]] = field(default_factory=dict)
    """Names of the tasks by environment type."""
    fallback_reasons: dict[str, str] = field(default_factory=dict)
    """What `local` lacks, by the name of each task that `auto` runs elsewhere."""
    unsupported: list[str] = field(default_factory=list)
    """Tasks that cannot run in their sandbox."""
    refused: dict[str, str] = field(default_factory=dict)
    """The reason, by the name of each task that the installed Harbor refuses in every sandbox."""
    unset_variables: list[str] = field(default_factory=list)
    """Tasks with environment variables that are not set."""
    exposed: dict[str, str] = field(default_factory=dict)
    """Access of sandboxes to this machine, by the name of each task that is not trusted."""
    trusted: list[str] = field(default_factory=list)
    """Trusted tasks whose sandboxes can access this machine."""
    host_network: list[str] = field(default_factory=list)
    """Tasks that use this machine's network although the run file does not request it."""
    shared_ports: list[str] = field(default_factory=list)
    """Tasks whose parallel trials share ports of this machine."""
    localhost_variables: list[str] = field(default_factory=list)
    """Tasks that pass a localhost URL of this machine into a sandbox that has its own localhost."""
    ignored_keys: list[str] = field(default_factory=list)
    """Tasks with task.toml keys that Harbor ignores."""
    ignored_files: list[str] = field(default_factory=list)
    """Tasks with compose files that Harbor ignores."""


def inspect_tasks(
    tasks: Iterable[TaskRef],
    environment_type: str,
    kwargs: Mapping[str, object],
    variables: Mapping[str, str],
    trusted: Sequence[str] = (),
) -> TaskReport:
    """Inspect the files of each task.

    Args:
        tasks: The tasks.
        environment_type: Their environment type, or `auto`.
        kwargs: The environment's options.
        variables: Environment variables that trials will have.
        trusted: Names or patterns of tasks that may access this machine.
    """
    found = TaskReport()
    for task in tasks:
        try:
            with reading_task(task.name):
                _inspect(found, task, environment_type, kwargs, variables, trusted)
        except UserError as error:
            found.unsupported.append(f"{task.name} ({error.what})")
    return found


def _inspect(
    found: TaskReport,
    task: TaskRef,
    environment_type: str,
    kwargs: Mapping[str, object],
    variables: Mapping[str, str],
    trusted: Sequence[str],
) -> None:
    """Add the results of one task to the report."""
    choice, requirements = choose_environment(task.path, environment_type, kwargs), TaskRequirements(task.path)
    found.placements.setdefault(choice.kind, []).append(task.name)
    if choice.reasons:
        found.fallback_reasons[task.name] = "; ".join(choice.reasons)
    if unsupported := requirements.unsupported(choice.kind, choice.kwargs):
        found.unsupported.append(f"{task.name} ({'; '.join(unsupported)})")
    if unset := requirements.unset_variables(variables):
        found.unset_variables.append(f"{task.name} ({'; '.join(unset)})")
    if exposure := "; ".join(requirements.exposure(choice.kind, variables)):
        if is_trusted(task.name, trusted):
            found.trusted.append(f"{task.name} ({exposure})")
        else:
            found.exposed[task.name] = exposure
    if requirements.uses_host_network(choice.kind, choice.kwargs) and choice.kwargs.get("network") != "host":
        found.host_network.append(task.name)
    if ports := requirements.shared_ports(choice.kind, choice.kwargs):
        found.shared_ports.append(f"{task.name} ({', '.join(map(str, ports))})")
    if urls := requirements.localhost_variables(choice.kind, choice.kwargs, variables):
        found.localhost_variables.append(f"{task.name} ({'; '.join(urls)})")
    if keys := ignored_keys(requirements.config):
        found.ignored_keys.append(f"{task.name} ({', '.join(keys)})")
    if files := requirements.ignored_files():
        found.ignored_files.append(f"{task.name} ({', '.join(files)})")


def check_requirements(plan: LaunchPlan) -> Iterator[Finding]:
    """Check each source's tasks against the sandboxes of its harness."""
    reported: set[str] = set()
    for key, env in plan.envs.items():
        harness = env.agent.harness
        if harness is None:
            continue
        where = plan.where(f"{key}.agent.harness.environment_type")
        found = inspect_tasks(
            plan.tasks[f"{key}.taskset"],
            harness.environment_type,
            harness.environment_kwargs,
            variables(),
            harness.trusted_tasks,
        )
        for finding in _findings(found, harness.environment_type, where, HARNESS_TABLE):
            if finding.what not in reported:
                reported.add(finding.what)
                yield finding


def _findings(found: TaskReport, kind: str, where: str, table: str = "") -> Iterator[Finding]:
    if found.exposed:
        tasks = [f"{name} ({access})" for name, access in found.exposed.items()]
        what = f"sandboxes can access this machine in {listed(tasks)}"
        key = f"{where.rpartition('.')[0]}.trusted_tasks" if table else where
        yield red("sandboxes", what, trust_remedy(list(found.exposed), table), key)
    if found.unsupported:
        what = f"environment_type = {kind!r} cannot run {listed(found.unsupported)}"
        yield red("sandboxes", what, unsupported_remedy(kind, in_file=bool(table)), where)
    if found.refused:
        yield refused_finding(found.refused, where)
    if found.unset_variables:
        what = f"environment variables are not set for {listed(found.unset_variables)}"
        yield red("variables", what, _SET_VARIABLES, where)
    if found.trusted:
        what = f"sandboxes can access this machine in {listed(found.trusted)}"
        yield yellow("sandboxes", what, _TRUSTED, where)
    if found.host_network:
        what = f"the agent can reach this machine's localhost in {listed(found.host_network)}"
        do = f"{network_choice.remedy()}, {_ACCEPT_HOST_NETWORK}"
        yield yellow("sandboxes", what, do, where)
    if found.shared_ports:
        what = f"parallel trials share this machine's ports and can reach each other in {listed(found.shared_ports)}"
        yield yellow("sandboxes", what, _SEPARATE_NETWORKS, where)
    if found.localhost_variables:
        tasks = listed(found.localhost_variables)
        what = f"localhost URLs are passed into the sandbox, where localhost is the sandbox itself, in {tasks}"
        yield yellow("variables", what, _REACHABLE_ADDRESS, where)
    if found.ignored_keys:
        what = (
            f"Harbor ignores these task.toml keys ({count_tasks(found.ignored_keys)}): {name_first(found.ignored_keys)}"
        )
        yield yellow("tasks", what, _CORRECT_KEYS, where)
    if found.ignored_files:
        what = f"Harbor ignores a compose file and builds the Dockerfile in {listed(found.ignored_files)}"
        yield yellow("tasks", what, "rename the file to docker-compose.yaml, or remove it", where)
    if environment_entry(kind).chosen_from and not found.unsupported:
        yield green("sandboxes", placement_line(found))


def placement_line(found: TaskReport) -> str:
    """Describe in one line where `auto` runs the tasks."""
    counts = ", ".join(f"{len(names)} in {kind}" for kind, names in sorted(found.placements.items(), reverse=True))
    reasons = name_first([f"{name} ({reason})" for name, reason in found.fallback_reasons.items()])
    return f"auto: {counts}{': ' if reasons else ''}{reasons}"


def placement_lines(plan: LaunchPlan) -> list[str]:
    """A placement line for each source with an automatic environment type."""
    return list(
        dict.fromkeys(finding.what for finding in check_requirements(plan) if finding.what.startswith("auto: "))
    )


def refuse_unsupported(
    tasks: Sequence[TaskRef],
    environment_type: str,
    kwargs: Mapping[str, object],
    where: str,
    trusted: Sequence[str] = (),
    agent: str = TRAINABLE_TERMINUS,
) -> TaskReport:
    """Inspect the tasks, print warnings and return the report.

    Raises:
        UserError: A task cannot run in its sandbox, an environment variable is not set, or a task that is not trusted
            can access this machine.
    """
    found = inspect_tasks(tasks, environment_type, kwargs, variables(), trusted)
    found.refused.update(refused_tasks(tasks, agent))
    findings = list(_findings(found, environment_type, where))
    stop_on_red(findings)
    warn(findings)
    return found


def refusal(
    task: TaskRef,
    environment_type: str,
    kwargs: Mapping[str, object],
    where: str,
    trusted: Sequence[str],
    agent: str = TRAINABLE_TERMINUS,
) -> UserError | None:
    """Return why a task cannot run in its sandbox or must not; None if it can. Arguments as `refuse_unsupported`."""
    try:
        found = inspect_tasks([task], environment_type, kwargs, variables(), trusted)
        found.refused.update(refused_tasks([task], agent))
        stop_on_red(list(_findings(found, environment_type, where)))
    except UserError as error:
        return error
    return None


def warn_about(found: TaskReport, environment_type: str, where: str) -> None:
    """Print the warnings of a report."""
    warn(list(_findings(found, environment_type, where)))


def variables() -> dict[str, str]:
    """Return the environment variables of trials: this process's variables and the ones in `.env`."""
    return dotenv() | dict(os.environ)


_EVALUATION = "evaluation"
SHOWN = 3
"""Most pairs of one evaluation that are named."""


def check_leftovers(plan: LaunchPlan) -> Iterator[Finding]:
    """Propose to kill leftover processes before grading where `tasks check` showed that no task needs a service."""
    from harbortrainer.tasks.passed_checks import needs_no_service

    for key, harness in plan.harnesses.items():
        tasks = plan.tasks[f"{key.removesuffix('.agent.harness')}.taskset"]
        can_kill = harness.leftovers == "keep" and environment_entry(harness.environment_type).examinable
        if can_kill and tasks and all(map(needs_no_service, tasks)):
            what = "no task needs a service, but processes that an agent leaves running can disturb grading"
            yield yellow("leftovers", what, 'set leftovers = "kill"', plan.where(f"{key}.leftovers"))


def check_contamination(plan: LaunchPlan) -> Iterator[Finding]:
    """Compare the tasks of each evaluation with all training tasks and with the tasks that a warm-up teaches."""
    trained, taught = plan.training_tasks, taught_tasks(plan)
    for key, held_out in plan.tasks.items():
        if not held_out:
            yield from empty_side(plan, key)
        elif key.startswith("orchestrator.eval."):
            yield contamination(plan, key, trained, held_out)
            yield from taught_solutions(plan, key, taught, held_out)


def taught_tasks(plan: LaunchPlan) -> list[TaskRef]:
    """The tasks of the folder whose solutions a warm-up teaches; empty without one, or if it cannot be read."""
    folder = plan.run.warmup.tasks if isinstance(plan.run, RunConfig) and plan.run.warmup is not None else None
    try:
        return [] if folder is None else tasks_with_solution(folder)
    except UserError:
        return []  # `model_files.check` reports it


def taught_solutions(plan: LaunchPlan, key: str, taught: list[TaskRef], held_out: list[TaskRef]) -> Iterator[Finding]:
    """Compare one evaluation's tasks with those whose solutions the warm-up teaches."""
    table = plan.tasksets[key]
    copies = overlap(taught, held_out, table.near_copy)
    if copies and not table.may_overlap:
        what = (
            f"the warm-up teaches solutions of {len(copies)} of {len(held_out)} held-out tasks: {name_copies(copies)}"
        )
        do = "remove warmup.tasks, so that it learns the training tasks; may_overlap = true evaluates on them anyway"
        yield red(_EVALUATION, what, do, plan.where("warmup.tasks"))


def empty_side(plan: LaunchPlan, key: str) -> Iterator[Finding]:
    """Explain why a taskset that can be read has no tasks to run."""
    table = plan.tasksets[key]
    try:
        found = available_tasks(table)
    except UserError:
        return  # `machine_checks.check_tasks` reports it
    from harbortrainer.tasks.task_selection import checked_tasks  # slow to import

    setting = "split"
    try:
        side = select_side(found, table) if found else []
        setting = "checked_only" if table.checked_only else "audited"
        checked_tasks(side, table) if side else None
    except UserError as error:
        yield red("tasks", f"{error.where}: {error.what}", error.do, plan.where(f"{key}.{setting}"))


def contamination(plan: LaunchPlan, key: str, trained: list[TaskRef], held_out: list[TaskRef]) -> Finding:
    """Compare one evaluation's tasks with the training tasks."""
    table = plan.tasksets[key]
    copies = overlap(trained, held_out, table.near_copy)
    if not copies:
        return green(_EVALUATION, f"none of {len(held_out)} held-out tasks is a training task")
    what = f"{len(copies)} of {len(held_out)} held-out tasks are trained on: {name_copies(copies)}"
    if table.may_overlap:
        do = "expect memorized solutions, or evaluate on other tasks and set it to false"
        return yellow(_EVALUATION, what, do, plan.where(f"{key}.may_overlap"))
    do = (
        'exclude them, use split = "train" and split = "eval" of one folder, or raise near_copy; '
        "may_overlap = true evaluates on them anyway"
    )
    return red(_EVALUATION, what, do, plan.where(f"{key}.{'tasks_dir' if table.dataset is None else 'dataset'}"))


def name_copies(copies: list[CopyPair]) -> str:
    """Name the first pairs, and the number of the others."""
    more = f", ... ({len(copies) - SHOWN} more: `harbortrainer tasks overlap`)" if len(copies) > SHOWN else ""
    return ", ".join(map(str, copies[:SHOWN])) + more


def check_agent_names(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that the installed Harbor has the run's agents. Prime-RL has its own Harbor, which is not checked."""
    for key, harness in plan.harnesses.items():
        if not plan.on_prime_rl and is_missing(harness.agent):
            yield red("agent", *_missing_agent(harness.agent), plan.where(f"{key}.agent"))


def refuse_agent(agent: str, where: str) -> None:
    """Raise `UserError` for an agent that the installed Harbor does not have; `where` names its key or option."""
    if is_missing(agent):
        what, do = _missing_agent(agent)
        raise UserError(what, where=where, do=do)


def is_missing(agent: str) -> bool:
    """Whether the agent is neither a class nor one of Harbor's agents."""
    return not is_class(agent) and agent not in SHORT_NAMES and agent.partition(":")[0] not in agents_of_harbor()


def _missing_agent(agent: str) -> tuple[str, str]:
    """What is wrong and what to do, for an agent that Harbor does not have."""
    near = get_close_matches(agent, [*agents_of_harbor(), *SHORT_NAMES], n=1)
    do = f"did you mean {near[0]!r}?" if near else "choose one of docs/agents.md, or pass module:Class"
    return f"the installed Harbor has no agent {agent!r}", do


def agents_of_harbor() -> list[str]:
    """Names of Harbor's agents. Imports a small part of Harbor."""
    from harbor.models.agent.name import AgentName

    return [agent.value for agent in AgentName]
