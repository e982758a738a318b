"""Cleanup after a run: ends the processes, containers and remote sandboxes that it left behind.

Processes have the run's identity in their environment (`HARBORTRAINER_RUN`); containers and remote sandboxes have it in
a label. Local sandboxes end with the process that started them. Sandboxes of a remote type without a `cleanup_script`
end with the provider's timeout. Harbor ends a sandbox with its trial, so this is for trials whose process was killed.

Invariant: only processes and sandboxes with this run's identity are ended. A cleanup script runs in a process of its
own, with a Python that has the provider's package.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from harbortrainer.config.environment_table import environment_entry
from harbortrainer.engines.programs import program_output
from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE

DOCKER_TIMEOUT_S = 60
REMOTE_TIMEOUT_S = 120
PROCESS_GRACE_S = 10.0


@dataclass(frozen=True)
class CleanupReport:
    """Number of processes, containers and networks that were ended."""

    processes: int
    containers: int
    networks: int

    def __str__(self) -> str:
        parts = [f"{count} {what}" for what, count in vars(self).items() if count]
        return f"cleaned up: {', '.join(parts)}" if parts else ""


def clean_up(run: str) -> CleanupReport:
    """End all processes and containers of a run, and the networks of its containers."""
    return CleanupReport(end_processes(run), *end_containers(run))


def end_containers(run: str) -> tuple[int, int]:
    """Remove the containers of a run and of their Compose projects, and the networks; return both counts."""
    projects = _projects(run)
    containers = _docker("ps", "-aq", "--filter", f"label={RUN_LABEL}={run}")
    for project in projects:
        containers += _docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={project}")
    containers = list(dict.fromkeys(containers))
    if containers:
        _docker("rm", "--force", "--volumes", *containers)
    networks = [
        name
        for project in projects
        for name in _docker("network", "ls", "-q", "--filter", f"label=com.docker.compose.project={project}")
    ]
    if networks:
        _docker("network", "rm", *networks)
    return len(containers), len(networks)


def end_processes(run: str, *, grace_s: float = PROCESS_GRACE_S) -> int:
    """Terminate the processes with the run's identity, and kill them after `grace_s` seconds; return their number."""
    found = processes_of(run)
    for process in found:
        _ignore_errors(process.terminate)
    _, alive = psutil.wait_procs(found, timeout=grace_s)
    for process in alive:
        _ignore_errors(process.kill)
    psutil.wait_procs(alive, timeout=grace_s)
    return len(found)


def processes_of(run: str) -> list[psutil.Process]:
    """Return the processes other than this one whose environment has the run's identity."""
    own = psutil.Process().pid
    mark = f"{RUN_VARIABLE}={run}".encode()
    found = []
    for process in psutil.process_iter():
        if process.pid == own:
            continue
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0"):
            found.append(process)
    return found


def _ignore_errors(action: Callable[[], None]) -> None:
    try:
        action()
    except psutil.Error:
        return


def _projects(run: str) -> list[str]:
    """Return the Compose projects of the run's containers; their sidecars do not have our label."""
    form = '{{.Label "com.docker.compose.project"}}'
    names = _docker("ps", "-a", "--filter", f"label={RUN_LABEL}={run}", "--format", form)
    return list(dict.fromkeys(names))


def _docker(*arguments: str) -> list[str]:
    """Return the words of docker's output; empty if it fails."""
    output = program_output("docker", *arguments, timeout_s=DOCKER_TIMEOUT_S)
    return output.split() if output else []


def end_remote(run: str, providers: Sequence[str], python: Path) -> list[str]:
    """End the sandboxes that a run left at providers.

    Args:
        run: The run's identity.
        providers: Remote environment types of the run.
        python: An interpreter that may have the providers' packages.

    Returns:
        Messages for the user, one line each; empty if there was nothing to end.
    """
    return [line for provider in providers if (line := _end(run, provider, python))]


def _end(run: str, provider: str, python: Path) -> str:
    module = environment_entry(provider).cleanup_script
    if module is None:
        return f"sandboxes at {provider} whose trial was killed end with the provider's own timeout"
    script = find_spec(module)
    assert script is not None and script.origin is not None, module
    for interpreter in (str(python), sys.executable):
        # -P: the script's folder is not on the path, where its modules could hide the provider's.
        output = program_output(interpreter, "-P", script.origin, run, timeout_s=REMOTE_TIMEOUT_S)
        if output is not None:
            count = output.strip().splitlines()[-1]
            return "" if count == "0" else f"cleaned up: {count} sandboxes at {provider}"
    return f"sandboxes at {provider} could not be listed; those whose trial was killed end with their timeout"
