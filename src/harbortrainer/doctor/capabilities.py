"""What this machine can do, and what to install for more: `harbortrainer doctor` without a run file.

Nothing here is an error: what is missing is needed by some runs only. The checks are those of a run, at a lower level.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec

from harbortrainer.config.agent_table import OWN_SERVICE, UNSUPPORTED_AGENTS
from harbortrainer.config.environment_table import ENVIRONMENT_TYPES
from harbortrainer.doctor import credentials, docker_daemon, engine_checks, machine_checks
from harbortrainer.doctor.finding import Finding, Level, green
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.engine_choice import require_extra
from harbortrainer.engines.vllm.vllm_process import require_vllm
from harbortrainer.errors import UserError
from harbortrainer.runs.display import plural

EMBEDDED = ("torch", "transformers", "peft", "fastapi")


def examine_capabilities(plan: LaunchPlan) -> list[Finding]:
    """List processors, engines, agents, sandboxes and sandbox providers."""
    found = (*_processors(plan), *_engines(plan), _agents(), *_sandboxes(), *_providers())
    return [replace(one, level=Level.YELLOW) if one.level is Level.RED else one for one in found]


def _processors(plan: LaunchPlan) -> Iterator[Finding]:
    cores = f"{len(os.sched_getaffinity(0))} CPU cores"
    names = [f"{gpu.name} ({gpu.memory_mib / 1024:.0f} GiB)" for gpu in plan.gpus]
    yield green("processors", f"{', '.join(names) or 'no NVIDIA GPU'}; {cores}")


def _engines(plan: LaunchPlan) -> Iterator[Finding]:
    try:
        require_extra(*EMBEDDED)
    except UserError as error:
        yield _missing("embedded engine", error)
    else:
        yield green("embedded engine", f"torch {version('torch')}, transformers {version('transformers')}")
    yield from engine_checks.prime_rl(plan)
    try:
        yield green("vLLM", require_vllm().version)
    except UserError as error:
        if plan.gpus:
            yield _missing("vLLM", error)


def _agents() -> Finding:
    refused = plural(len(OWN_SERVICE | UNSUPPORTED_AGENTS.keys()), "agent")
    what = (
        "terminus-2 and plain run outside the sandbox; Harbor's installed agents, e.g. mini-swe-agent, use the "
        f"model proxy in local and Docker sandboxes; {refused} of Harbor can't be trained"
    )
    return replace(green("agents", what), do="install such an agent's program in the task's image (docs/agents.md)")


def _sandboxes() -> Iterable[Finding]:
    yield machine_checks.local_sandbox("")
    if (builder := machine_checks.image_builder()) is not None:
        yield builder
    yield from docker_daemon.needed("", closed=True)


def _providers() -> Iterator[Finding]:
    names = [name for name, entry in ENVIRONMENT_TYPES.items() if entry.remote]
    missing = [name for name in names if find_spec(name) is None]
    for name in names:
        if name in missing:
            continue
        if problem := credentials.provider_problem(name):
            yield replace(green("sandboxes", f"{name}: {problem}"), do="set its keys in .env, or log in with its CLI")
        else:
            yield green("sandboxes", f"{name}: credentials found")
    if missing:
        do = "run `pip install 'harbor[NAME]'` for one of them"
        yield replace(green("sandboxes", f"not installed: {', '.join(missing)}"), do=do)


def _missing(about: str, error: UserError) -> Finding:
    return Finding(Level.YELLOW, about, error.what, error.do)
