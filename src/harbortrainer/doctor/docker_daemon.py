"""Docker: is there a daemon, does it know Compose v2, and are there networks for all trials at once?"""

import ipaddress
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, Field

from harbortrainer.doctor.finding import Finding, green, red, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.programs import output_of
from harbortrainer.sandbox.environment_choice import chosen
from harbortrainer.sandbox.task_demands import TaskDemands

DEFAULT_NETWORKS = 31
"""What Docker's built-in address pools hold: 15 of 172.17.0.0/12 in /16 and 16 of 192.168.0.0/16 in /20."""

POOLS = '{"default-address-pools": [{"base": "10.200.0.0/16", "size": 24}]}'


class AddressPool(BaseModel):
    """Addresses that the daemon gives to networks, `size` bits of prefix each."""

    base: str = Field(alias="Base")
    size: int = Field(alias="Size")


class DaemonInfo(BaseModel):
    """What `docker info` says of the daemon."""

    version: str = Field("", alias="ServerVersion")
    pools: list[AddressPool] | None = Field(None, alias="DefaultAddressPools")


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """Daemon, Compose, address pools, login."""
    where = plan.environment_types.get("docker")
    if where is None:
        return
    info = daemon()
    yield from needed(where, closed=closes_networks(plan), info=info)
    if isinstance(info, str):
        return
    yield networks(info, plan.parallel, used_networks(), plan.where("orchestrator.concurrency.max_inflight"))
    yield login(Path(os.environ.get("DOCKER_CONFIG", Path.home() / ".docker")) / "config.json")


def needed(where: str, *, closed: bool, info: "DaemonInfo | str | None" = None) -> Iterator[Finding]:
    """What containers of tasks need: a daemon, Compose, and buildx where a task has less than the whole network.

    Args:
        closed: Whether one has.
        info: What the daemon said.
    """
    info = daemon() if info is None else info
    if isinstance(info, str):
        do = 'start it (`sudo systemctl start docker`), or use environment_type = "local"'
        yield red("Docker", info, do, where)
        return
    yield green("Docker", f"daemon {info.version}")
    yield compose(where)
    if closed and output_of("docker", "buildx", "version") is None:
        what = "docker has no `buildx` command, which Harbor needs for a network_mode other than public"
        yield red("buildx", what, "install docker-buildx-plugin", where)


def closes_networks(plan: LaunchPlan) -> bool:
    """Whether a task that is played in Docker has less than the whole network."""
    return any(
        TaskDemands(task.path).closes_the_network
        for key, harness in plan.harnesses.items()
        for task in plan.played[f"{key.removesuffix('.agent.harness')}.taskset"]
        if chosen(task.path, harness.environment_type, harness.environment_kwargs).kind == "docker"
    )


def daemon() -> DaemonInfo | str:
    """What the daemon says about itself, or why it does not."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    info = DaemonInfo.model_validate_json(output_of("docker", "info", "--format", "{{json .}}") or "{}")
    return info if info.version else "the daemon does not answer"


def compose(where: str) -> Finding:
    """Compose v2, which Harbor calls as `docker compose`."""
    version = (output_of("docker", "compose", "version", "--short") or "").strip()
    if version and not version.lstrip("v").startswith("1."):
        return green("Compose", f"version {version}")
    what = f"version {version} is too old" if version else "docker has no `compose` command"
    return red("Compose", what, "install Compose v2 (docker-compose-plugin)", where)


def networks(info: DaemonInfo, parallel: int | None, used: int, where: str) -> Finding:
    """Each trial of a task with sidecars or a network policy has a network of its own; all others share one."""
    free = max(capacity(info.pools or []) - used, 0)
    trials = f"{parallel or 'any number of'} parallel trials"
    what = f"{trials}, a network each where a task has sidecars or a network policy; {free} networks are free"
    if parallel is None or parallel > free:
        do = f"lower orchestrator.concurrency.max_inflight, or give Docker more: {POOLS} in /etc/docker/daemon.json"
        return yellow("Docker networks", what, do, where)
    return green("Docker networks", what)


def capacity(pools: list[AddressPool]) -> int:
    """How many networks fit into the daemon's address pools."""
    if not pools:
        return DEFAULT_NETWORKS
    return sum(2 ** max(pool.size - ipaddress.ip_network(pool.base).prefixlen, 0) for pool in pools)


def used_networks() -> int:
    """Networks that take addresses now; `host` and `none` take none."""
    drivers = (output_of("docker", "network", "ls", "--format", "{{.Driver}}") or "").split()
    return sum(driver not in ("host", "null") for driver in drivers)


def login(config: Path) -> Finding:
    """Whether pulls are made under an account."""
    try:
        auths = json.loads(config.read_text()) if config.is_file() else {}
    except (OSError, json.JSONDecodeError):
        auths = {}
    if auths.get("auths") or auths.get("credHelpers"):
        return green("Docker login", "done")
    return yellow("Docker login", "not done; a registry may limit anonymous pulls", "run `docker login`")
