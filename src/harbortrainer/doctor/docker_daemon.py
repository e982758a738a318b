"""Checks of Docker: daemon, Compose v2, buildx, this machine's folders, users, address pools and login."""

import ipaddress
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel, Field

from harbortrainer.config.environment_table import environment_entry
from harbortrainer.doctor.finding import Finding, green, red, red_ones, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.doctor.machine_checks import existing
from harbortrainer.engines.programs import error_output, program_output
from harbortrainer.errors import UserError
from harbortrainer.sandbox.containers.container_changes import can_read_layers
from harbortrainer.sandbox.environment_types import EnvironmentChoice
from harbortrainer.sandbox.task_requirements import TaskRequirements
from harbortrainer.tasks.task_errors import inspected
from harbortrainer.tasks.task_folder import TaskRef

DEFAULT_NETWORKS = 31
"""Networks in Docker's default address pools: 15 of 172.17.0.0/12 in /16 and 16 of 192.168.0.0/16 in /20."""

_NO_IMAGE, _NOT_SEEN = "harbortrainer.invalid/none", "bind source path does not exist"
_REMAPPED = {"userns": "userns-remap", "rootless": "rootless mode"}
"""Names of security options of a daemon whose users are not this machine's, and what they are called."""

_TIMEOUT_S = 10.0
"""Most seconds that a daemon takes to answer."""
POOLS = '{"default-address-pools": [{"base": "10.200.0.0/16", "size": 24}]}'


class AddressPool(BaseModel):
    """A pool of addresses for the daemon's networks. `size` is the prefix length of each network."""

    base: str = Field(alias="Base")
    size: int = Field(alias="Size")


class DaemonInfo(BaseModel):
    """The fields of `docker info` that are used here."""

    version: str = Field("", alias="ServerVersion")
    driver: str = Field("", alias="Driver")
    data_root: str = Field("", alias="DockerRootDir")
    pools: list[AddressPool] | None = Field(None, alias="DefaultAddressPools")
    security: list[str] | None = Field(None, alias="SecurityOptions")

    @property
    def remapping(self) -> str:
        """Why a container's users are not this machine's; "" if they are."""
        options = {option.split(",")[0].removeprefix("name=") for option in self.security or []}
        return ", ".join(name for option, name in _REMAPPED.items() if option in options)


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """Check daemon, Compose, address pools and login, if the run uses Docker."""
    where = plan.key_of_type(lambda entry: entry.needs_docker)
    if where is None:
        return
    info = daemon()
    folder = plan.run.run_dir if plan.run else Path.cwd()
    yield from needed(where, closed=closes_networks(plan), info=info, folder=folder)
    if isinstance(info, str):
        return
    yield from tampering(plan, info)
    yield networks(info, plan.parallel, used_networks(), plan.where("orchestrator.concurrency.max_inflight"))
    yield login(Path(os.environ.get("DOCKER_CONFIG", Path.home() / ".docker")) / "config.json")


def needed(
    where: str, *, closed: bool, info: "DaemonInfo | str | None" = None, folder: Path | None = None
) -> Iterator[Finding]:
    """Check what task containers need: daemon, folders, Compose, and buildx if a task restricts its network.

    Args:
        where: The key or option that selects Docker.
        closed: Whether a task restricts its network.
        info: The daemon's information, or its error message; fetched when None.
        folder: The folder in which trials will be; None for the current one. It may be missing.
    """
    info = daemon() if info is None else info
    if isinstance(info, str):
        other = "--environment local" if where.startswith("--") else 'environment_type = "local"'
        start = "correct or unset DOCKER_HOST" if _host() else "start it (`sudo systemctl start docker`)"
        yield red("Docker", info, f"{start}, or use {other}", where)
        return
    yield green("Docker", f"daemon {info.version}")
    if info.remapping:
        what = f"the daemon remaps users ({info.remapping}), which was not tested: log folders may be unreadable"
        yield yellow("Docker users", what, "run one trial first, or turn remapping off", where)
    yield from folders(folder or Path.cwd(), where)
    yield compose(where)
    if closed and program_output("docker", "buildx", "version") is None:
        what = "docker has no `buildx` command, which Harbor needs for a network_mode other than public"
        yield red("buildx", what, "install docker-buildx-plugin", where)


def refusals(placed: Iterable[tuple[TaskRef, EnvironmentChoice, TaskRequirements]], where: str) -> dict[str, UserError]:
    """Return why tasks cannot run in this machine's Docker, by name.

    Args:
        placed: Tasks with their environment and requirements.
        where: The option that selects Docker.
    """
    needs = {task.name: own for task, choice, own in placed if environment_entry(choice.kind).needs_docker}
    if not needs:
        return {}
    info = daemon()
    closed = any(own.restricts_network for own in needs.values())
    always, if_closed = (red_ones(needed(where, closed=one, info=info)) for one in (False, closed))
    found: dict[str, UserError] = {}
    for name, own in needs.items():
        if reds := if_closed if own.restricts_network else always:
            found[name] = UserError(reds[0].what, where=reds[0].where or reds[0].about, do=reds[0].do)
    return found


def tampering(plan: LaunchPlan, info: DaemonInfo) -> Iterator[Finding]:
    """Check that `on_tampering` has an effect in containers."""
    if can_read_layers(info.driver) and Path(info.data_root).is_dir():
        return
    for key, harness in plan.harnesses.items():
        if harness.on_tampering != "flag" and environment_entry(harness.environment_type).needs_docker:
            what = f'changed tools are not detected in containers here, but on_tampering = "{harness.on_tampering}"'
            do = 'run as root beside a daemon with storage driver overlay2, or use environment_type = "local"'
            yield red("changed tools", what, do, plan.where(f"{key}.on_tampering"))


def closes_networks(plan: LaunchPlan) -> bool:
    """Whether a task that runs in Docker restricts its network."""
    return any(
        needs.restricts_network
        for key, harness in plan.harnesses.items()
        for _, choice, needs in inspected(
            plan.tasks[f"{key.removesuffix('.agent.harness')}.taskset"],
            harness.environment_type,
            harness.environment_kwargs,
        )
        if environment_entry(choice.kind).needs_docker
    )


def daemon() -> DaemonInfo | str:
    """Return the daemon's information, or an error message."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    output = program_output("docker", "info", "--format", "{{json .}}", timeout_s=_TIMEOUT_S)
    info = DaemonInfo.model_validate_json(output or "{}")
    at = f" at DOCKER_HOST ({_host()})" if _host() else ""
    return info if info.version else f"the daemon{at} does not answer"


def _host() -> str:
    """Return the address of the daemon that the user set; "" for Docker's own."""
    return os.environ.get("DOCKER_HOST", "")


def folders(folder: Path, where: str) -> Iterator[Finding]:
    """Check that the daemon sees this machine's folders: a trial mounts its log folders, also for the reward.

    A daemon on another machine does not, nor one whose socket is mounted into the container that this process runs in.
    """
    place = existing(folder)
    if os.access(place, os.W_OK) and not sees(place):
        what = f"the daemon does not see this machine's folder {place}, so no trial would have a reward"
        do = "run on the daemon's machine, or mount the folder there under the same path; see DOCKER_HOST"
        yield red("Docker folders", what, do, where)


def sees(folder: Path) -> bool:
    """Whether the daemon sees a new folder in `folder`. It looks for that before it looks for the image."""
    with TemporaryDirectory(dir=folder) as fresh:
        mount = f"type=bind,source={fresh},target=/mounted"
        return _NOT_SEEN not in error_output("docker", "create", "--pull=never", "--mount", mount, _NO_IMAGE)


def compose(where: str) -> Finding:
    """Check Compose v2, which Harbor calls as `docker compose`."""
    version = (program_output("docker", "compose", "version", "--short") or "").strip()
    if version and not version.lstrip("v").startswith("1."):
        return green("Compose", f"version {version}")
    what = f"version {version} is too old" if version else "docker has no `compose` command"
    return red("Compose", what, "install Compose v2 (docker-compose-plugin)", where)


def networks(info: DaemonInfo, parallel: int | None, used: int, where: str) -> Finding:
    """Check the number of free networks. A trial uses one if its task has sidecars or a network policy."""
    free = max(capacity(info.pools or []) - used, 0)
    trials = f"{parallel or 'any number of'} parallel trials"
    what = f"{trials}, {free} free networks (one per trial of a task with sidecars or a network policy)"
    if parallel is None or parallel > free:
        do = f"lower orchestrator.concurrency.max_inflight, or give Docker more: {POOLS} in /etc/docker/daemon.json"
        return yellow("Docker networks", what, do, where)
    return green("Docker networks", what)


def capacity(pools: list[AddressPool]) -> int:
    """Count the networks in the daemon's address pools."""
    if not pools:
        return DEFAULT_NETWORKS
    return sum(2 ** max(pool.size - ipaddress.ip_network(pool.base).prefixlen, 0) for pool in pools)


def used_networks() -> int:
    """Count the networks that use addresses; `host` and `none` use none."""
    drivers = (program_output("docker", "network", "ls", "--format", "{{.Driver}}") or "").split()
    return sum(driver not in ("host", "null") for driver in drivers)


def login(config: Path) -> Finding:
    """Check whether images are pulled with an account."""
    try:
        auths = json.loads(config.read_text()) if config.is_file() else {}
    except (OSError, json.JSONDecodeError):
        auths = {}
    if auths.get("auths") or auths.get("credHelpers"):
        return green("Docker login", "logged in")
    return yellow("Docker login", "not logged in; registries may limit anonymous pulls", "run `docker login`")
