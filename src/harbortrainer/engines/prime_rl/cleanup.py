"""After a run: no process and no sandbox of it stays.

Processes of a run carry its identity in their environment (`HARBORTRAINER_RUN`), containers in their label. Local
sandboxes end with the process that started them. Remote sandboxes end with their provider's own timeout.
Invariant: nothing is touched that does not carry this run's identity.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from harbortrainer.engines.programs import output_of
from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE

DOCKER_TIMEOUT_S = 60
PROCESS_GRACE_S = 10.0


@dataclass(frozen=True)
class Left:
    """What a run had left behind, and what was ended."""

    processes: int
    containers: int
    networks: int

    def __str__(self) -> str:
        parts = [f"{count} {what}" for what, count in vars(self).items() if count]
        return f"cleaned up: {', '.join(parts)}" if parts else ""


def clean_up(run: str, *, grace_s: float = PROCESS_GRACE_S) -> Left:
    """End every process and container of a run, and the networks of its containers."""
    return Left(end_processes(run, grace_s=grace_s), *end_containers(run))


def end_containers(run: str) -> tuple[int, int]:
    """Remove the containers of a run, those of their compose projects, and their networks; returns how many."""
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
    """End the processes that carry the run's identity, first asking, then not."""
    found = processes_of(run)
    for process in found:
        _quietly(process.terminate)
    _, alive = psutil.wait_procs(found, timeout=grace_s)
    for process in alive:
        _quietly(process.kill)
    psutil.wait_procs(alive, timeout=grace_s)
    return len(found)


def processes_of(run: str) -> list[psutil.Process]:
    """Processes other than this one whose environment names the run; `/proc` is read once for all."""
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


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except psutil.Error:
        return


def _projects(run: str) -> list[str]:
    """The compose projects that the run's containers belong to; their sidecars carry no label of ours."""
    form = '{{.Label "com.docker.compose.project"}}'
    names = _docker("ps", "-a", "--filter", f"label={RUN_LABEL}={run}", "--format", form)
    return list(dict.fromkeys(names))


def _docker(*arguments: str) -> list[str]:
    """The words of docker's output; nothing when there is none or the daemon does not answer."""
    said = output_of("docker", *arguments, timeout_s=DOCKER_TIMEOUT_S)
    return said.split() if said else []
