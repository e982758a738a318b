"""Environment types: requirements on the machine and abilities of the class.

An environment type is one class (a Harbor `BaseEnvironment`) and one entry here. Contract: the entry has everything
that is needed before the class is imported. Abilities beyond Harbor's are protocols of `sandbox/` (`Examinable`,
`ReportsChanges`, ...). Invariant: importing this module imports neither Harbor nor an environment class.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from harbortrainer.errors import choice_advice

AUTO = "auto"
"""Environment type that chooses per task: `local` if it fully supports the task, else `docker`."""


class Lifetime(NamedTuple):
    """An argument of an environment class: the time after which the provider ends a sandbox."""

    argument: str
    unit_s: int = 1
    """Seconds of the argument's unit."""
    most_s: float = float("inf")
    """The provider's own limit, in seconds."""

    def value(self, seconds: float) -> int:
        """Return the argument for at least this time, rounded up to a minute, as some providers require.

        Example:
            >>> Lifetime("minutes", 60).value(61)
            2
        """
        return int(min(60 * math.ceil(seconds / 60), self.most_s)) // self.unit_s


@dataclass(frozen=True)
class EnvironmentEntry:
    """One environment type."""

    import_path: str | None = None
    """`module:Class`, imported for the first trial; None if Harbor has a class for the type."""
    chosen_from: tuple[str, str] | None = None
    """Preferred type and fallback type, chosen per task. The entry has the requirements of both and the abilities that
    both have."""
    needs_namespaces: bool = False
    """Sandboxes are namespaces of this machine. A task that requires more is refused before the run."""
    needs_docker: bool = False
    """Sandboxes are Docker containers with the run's label, and support Compose files."""
    remote: bool = False
    """Sandboxes run at a provider and cannot reach this machine. Harbor checks the credentials."""
    takes_labels: bool = False
    """The class has the argument `labels`, for the labels `harbortrainer-run`, `-owner` and `-since`."""
    lifetime: Lifetime | None = None
    """The argument that limits a sandbox's lifetime at the provider; None if the class has none."""
    inventory: str | None = None
    """Module that lists and ends the sandboxes of this type, even if a killed process left them; None if there is none.

    It has the functions of `sandbox.inventory.Inventory`. That of a remote type runs as a script in a Python with the
    provider's package, so it imports nothing of this project.
    """
    builds_images: bool = False
    """The class has the arguments `image` and `rootfs`, and builds images on this machine."""
    shares_ports: bool = False
    """The class has the argument `network`, which lets sandboxes share this machine's network and ports."""
    examinable: bool = False
    """The class implements `Examinable`: the agent's leftover processes can be killed before grading."""
    reports_changes: bool = False
    """The class implements `ReportsChanges`: changed tools of the verifier are detected."""

    @property
    def has_known_limits(self) -> bool:
        """Whether this project checks a task against the sandbox's limits; otherwise only Harbor does."""
        return self.needs_namespaces or self.needs_docker


_LOCAL = "harbortrainer.sandbox.local:LocalEnvironment"
_DOCKER = "harbortrainer.sandbox.docker_environment:DockerSandbox"

ENVIRONMENT_TYPES: dict[str, EnvironmentEntry] = {
    AUTO: EnvironmentEntry(
        _LOCAL,  # for a set of tasks; each trial resolves its own type
        chosen_from=("local", "docker"),
        needs_namespaces=True,
        needs_docker=True,
        builds_images=True,
        shares_ports=True,
        examinable=True,
        reports_changes=True,
    ),
    "local": EnvironmentEntry(
        _LOCAL,
        needs_namespaces=True,
        inventory="harbortrainer.sandbox.local_inventory",
        builds_images=True,
        shares_ports=True,
        examinable=True,
        reports_changes=True,
    ),
    "docker": EnvironmentEntry(
        _DOCKER,
        needs_docker=True,
        inventory="harbortrainer.sandbox.containers.container_inventory",
        examinable=True,
        reports_changes=True,
    ),
    "modal": EnvironmentEntry(
        remote=True,
        takes_labels=True,
        lifetime=Lifetime("sandbox_timeout_secs", most_s=86_400),
        inventory="harbortrainer.sandbox.modal_inventory",
    ),
    "daytona": EnvironmentEntry(
        remote=True,
        takes_labels=True,
        lifetime=Lifetime("auto_stop_interval_mins", 60),
        inventory="harbortrainer.sandbox.daytona_inventory",
    ),
    "cwsandbox": EnvironmentEntry(remote=True, lifetime=Lifetime("max_lifetime_seconds")),
    "islo": EnvironmentEntry(remote=True, lifetime=Lifetime("delete_after_seconds")),
    "langsmith": EnvironmentEntry(remote=True, lifetime=Lifetime("idle_ttl_seconds")),
    "opensandbox": EnvironmentEntry(remote=True, lifetime=Lifetime("sandbox_timeout_sec")),
    "tensorlake": EnvironmentEntry(remote=True, lifetime=Lifetime("timeout_secs")),
}
PROVIDER = EnvironmentEntry(remote=True)
"""Entry for a name that is not in the table: another Harbor type."""


def environment_entry(environment_type: str) -> EnvironmentEntry:
    """Return the entry of a type's name or `module:Class`; a class is assumed to have all abilities."""
    if ":" in environment_type:
        return EnvironmentEntry(environment_type, examinable=True, reports_changes=True)
    return ENVIRONMENT_TYPES.get(environment_type, PROVIDER)


def unknown_type(environment_type: str) -> tuple[str, str] | None:
    """Return what is wrong with the name of an environment type, and what to do; None if it is known.

    For a name that is not in the table, the installed Harbor's names are imported, which takes a fraction of a second.
    """
    if environment_entry(environment_type) is not PROVIDER:
        return None
    from harbor.models.environment_type import EnvironmentType

    harbor = [member.value for member in EnvironmentType]
    if environment_type in harbor:
        return None
    names = list(dict.fromkeys([*ENVIRONMENT_TYPES, *harbor]))
    otherwise = f"use one of {', '.join(names)}, or module:Class"
    return f"unknown environment type {environment_type!r}", choice_advice(environment_type, names, otherwise)
