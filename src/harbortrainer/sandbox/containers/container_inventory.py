"""Inventory of containers: the `inventory` of the environment type `docker`."""

import json
from collections.abc import Sequence
from datetime import datetime

from harbortrainer.runs.label import OWNER_LABEL, RUN_LABEL
from harbortrainer.sandbox.inventory import require_output

TASK_LABEL = "harbortrainer.task"
_PROJECT = "com.docker.compose.project"
_FIELDS = (".ID", *(f'(.Label "{label}")' for label in (RUN_LABEL, OWNER_LABEL, TASK_LABEL)), ".CreatedAt")
_ROW = f"[{','.join(f'{{{{json {field}}}}}' for field in _FIELDS)}]"
"""A container as JSON: a task's Compose file may put anything into the labels of its services."""


def find(run: str) -> list[dict[str, str]]:
    """Return the containers with a run's label, or with "" those with any run's. Raises `InventoryError`."""
    label = f"{RUN_LABEL}={run}" if run else RUN_LABEL
    lines = require_output("docker", "ps", "-a", f"--filter=label={label}", "--format", _ROW)
    return [_facts(*json.loads(line)) for line in lines.splitlines()]


def _facts(number: str, run: str, owner: str, task: str, created: str) -> dict[str, str]:
    since = datetime.strptime(created[:25], "%Y-%m-%d %H:%M:%S %z").timestamp()
    return {"id": number, "run": run, "owner": owner, "task": task, "since": str(int(since))}


def end(ids: Sequence[str]) -> None:
    """Remove these containers and everything else of their Compose projects. Raises `InventoryError`."""
    form = f'{{{{.Label "{_PROJECT}"}}}}'
    projects = set(_words("ps", "-a", *(f"--filter=id={one}" for one in ids), "--format", form))
    all_ids = set(ids) | {
        one for project in projects for one in _words("ps", "-aq", f"--filter=label={_PROJECT}={project}")
    }
    _words("rm", "--force", "--volumes", *sorted(all_ids))
    networks = [
        one for project in projects for one in _words("network", "ls", "-q", f"--filter=label={_PROJECT}={project}")
    ]
    if networks:
        _words("network", "rm", *networks)


def _words(*arguments: str) -> list[str]:
    return require_output("docker", *arguments).split()
