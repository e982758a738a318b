"""A task's requirements on its sandboxes, and those that an environment type does not support, found before a run.

They are read from the task's files. Each finding starts with the task's key or file.
Invariant: a requirement without a finding is fully supported; `tests/parity` runs trials to check that.
"""

import contextlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path, PurePosixPath

from harbortrainer.config.environment_table import EnvironmentEntry, environment_entry
from harbortrainer.config.secret_names import is_secret_name
from harbortrainer.config.table import TomlTable, table_of, tables_of
from harbortrainer.harbor_compat import docker_allocates_gpus, task_refusal
from harbortrainer.harbor_compat.prior_context import TRAJECTORY, trajectory_problem
from harbortrainer.sandbox import dockerfile, host_variables, network_choice
from harbortrainer.sandbox.compose_exposure import compose_exposure
from harbortrainer.sandbox.compose_files import PROVIDERS_NAME, compose_files, unreadable_files
from harbortrainer.sandbox.errors_and_changes import SandboxBuildError
from harbortrainer.sandbox.images.image_choice import builder_for, host_root_problems, is_root
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.sandbox.named_ports import named_ports
from harbortrainer.sandbox.requested_sandboxes import RequestedSandbox, requested_sandboxes

_LOCALHOST = re.compile(r"://(?:[^/@]*@)?((?:localhost|127\.0\.0\.1|\[::1\])(?::\d+)?)(?:/|$)")
_MAX_SHOWN = 300
_ARTIFACTS = PurePosixPath("/logs/artifacts")
_PUBLISHED = (_ARTIFACTS, _ARTIFACTS)
"""The source and destination that Harbor adds to a task's artifacts, as the first."""
_ROOT_ONLY = "only root can give a sandbox other users"


class TaskRequirements:
    """The requirements of one task.

    Args:
        folder: The task's folder.
        config: The contents of its task.toml; read from the folder when None.

    Raises:
        OSError, ValueError: task.toml is missing or invalid.
    """

    def __init__(self, folder: Path, config: TomlTable | None = None) -> None:
        self.folder = folder
        if config is None:
            config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        self.config = config
        self.steps = tables_of(self.config, "steps")

    def unsupported(self, kind: str, kwargs: Mapping[str, object] | None = None) -> list[str]:
        """Return the requirements that an environment type does not support.

        None for types whose limits are not known here; Harbor checks them.

        Args:
            kind: The environment type.
            kwargs: Keyword arguments of its class.
        """
        entry = environment_entry(kind)
        if not entry.has_known_limits:
            return []
        sandboxes = self.sandboxes()
        found = [what for sandbox in sandboxes for what in _unsupported_anywhere(sandbox)]
        found += [what for sandbox in sandboxes for what in _gpus(sandbox, entry)]
        if entry.needs_namespaces:
            return [*found, *self._unsupported_local(sandboxes, entry, dict(kwargs or {}))]
        return [*found, *_undefined(sandboxes)]

    def exposure(self, kind: str, variables: Mapping[str, str] | None = None) -> list[str]:
        """Return the task's access to this machine: its secrets, what compose files grant, artifacts outside the trial.

        Args:
            kind: The environment type. Local sandboxes use no compose file. A provider's has another machine.
            variables: This machine's environment variables; None means this process's.
        """
        host, entry = os.environ if variables is None else variables, environment_entry(kind)
        found = [*dict.fromkeys(self._secrets_in_tables(host)), *self._links_out()]
        found += dict.fromkeys(self._misplaced_artifacts())
        provider = not entry.needs_docker
        for sandbox in self.sandboxes() if entry.needs_docker or not entry.needs_namespaces else ():
            folder, env = sandbox.folder, table_of(sandbox.table, "env")
            defined = [name for name in env if not host_variables.steers(name)]
            variables_there = host_variables.compose_variables(folder, provider=provider)
            names = host_variables.exposed(variables_there, host, defined)
            found += [f"{folder.name}/docker-compose.yaml has ${name} of this machine" for name in names]
            found += [] if entry.remote else compose_exposure(folder, self.folder, env, provider=provider)
        return [_printable(what) for what in found]

    def ignored_files(self) -> list[str]:
        """Return the files, as paths within the task, that only some providers take for compose files."""
        folders = {sandbox.folder: f"{sandbox.folder.name}/{PROVIDERS_NAME}" for sandbox in self.sandboxes()}
        return [name for folder, name in folders.items() if (folder / PROVIDERS_NAME).exists()]

    def _links_out(self) -> Iterator[str]:
        """Yield the task's files and folders that are links to a place outside; their content reaches the sandbox."""
        steps = self.folder / "steps"
        folders = [self.folder, *([steps, *sorted(steps.glob("*/"))] if steps.is_dir() else [])]
        for folder in folders:
            with os.scandir(folder) as entries:  # pathlib takes seven times as long
                links = sorted(entry.path for entry in entries if entry.is_symlink())
            root = os.path.realpath(self.folder) if links else ""
            for link in map(Path, links):
                if not Path(os.path.realpath(link)).is_relative_to(root):
                    yield f"{link.relative_to(self.folder)} is a link to {link.readlink()} of this machine"

    def _secrets_in_tables(self, host: Mapping[str, str]) -> Iterator[str]:
        """Yield the entries of task.toml's env tables that hold a secret of this machine."""
        for key, env in self._env_tables(solution=True):
            for name, variable in host_variables.variables_of_env(env):
                named_secret = variable in host and is_secret_name(name)
                if named_secret or host_variables.exposed({variable: _has_default(env[name])}, host):
                    yield f"[{key}.env] {name} is ${variable} of this machine"

    def uses_host_network(self, kind: str, kwargs: Mapping[str, object]) -> bool:
        """Whether the sandboxes reach this machine's localhost and concurrent trials share its ports."""
        public = any(sandbox.network == "public" for sandbox in self.sandboxes())
        return (
            environment_entry(kind).shares_ports
            and public
            and network_choice.is_host_network(kwargs.get("network", "auto"))
        )

    def shared_ports(self, kind: str, kwargs: Mapping[str, object]) -> list[int]:
        """Return the ports, named in the task's files, that its trials would share."""
        return named_ports(self.folder) if self.uses_host_network(kind, kwargs) else []

    def localhost_variables(self, kind: str, kwargs: Mapping[str, object], variables: Mapping[str, str]) -> list[str]:
        """Return the variables that pass localhost URLs into sandboxes, where localhost is the sandbox itself.

        Args:
            variables: This machine's environment variables.
        """
        if not environment_entry(kind).has_known_limits or self.uses_host_network(kind, kwargs):
            return []
        return [
            f"[{key}.env] {name} is ${variable}, {found[1]}"
            for key, name, variable, _ in self._variables()
            if (found := _LOCALHOST.search(variables.get(variable, "")))
        ]

    def sandboxes(self) -> list[RequestedSandbox]:
        """Return the task's sandboxes, the agent's first."""
        return requested_sandboxes(self.folder, self.config)

    def refusal(self) -> str:
        """Return why the installed Harbor refuses the task; empty if it does not. Imports Harbor."""
        return task_refusal(self.folder)

    def trajectory_problem(self, agent: str) -> str:
        """Return why an agent cannot play the task with its `trajectory.json`; empty if it can, or there is none."""
        first = self.folder / "steps" / str(self.steps[0]["name"]) if self.steps else self.folder
        return trajectory_problem(first / TRAJECTORY, agent)

    def _unsupported_local(
        self, sandboxes: Sequence[RequestedSandbox], entry: EnvironmentEntry, kwargs: dict[str, object]
    ) -> Iterator[str]:
        rootfs = Path(str(kwargs.get("rootfs", "/")))
        image = str(kwargs.get("image", "auto")) if entry.builds_images else "host"
        try:
            builder = builder_for(image, rootfs, Store())
        except ValueError as error:
            yield str(error)
            return
        yield from _undefined(
            sandboxes if builder is not None else sandboxes[1:]
        )  # the host's root needs no definition
        for sandbox in sandboxes:
            yield from (f"{sandbox.folder.name}/{file.name}" for file in compose_files(sandbox.folder))
            if sandbox.network == "allowlist":
                yield f'[{sandbox.key}] network_mode = "allowlist"'
            if builder is None:
                yield from _unsupported_on_rootfs(sandbox, rootfs)
        yield from self._sidecar_keys()
        yield from self._phase_networks()
        if os.geteuid() != 0:
            yield from self._other_users()
            yield from (what for sandbox in sandboxes for what in _image_user(sandbox))

    def _sidecar_keys(self) -> Iterator[str]:
        """Return the keys that name a sidecar."""
        for key, part in self._parts():
            for entry in tables_of(part, "artifacts"):
                if entry.get("service", "main") != "main":
                    yield f"{key}artifacts of the service {entry['service']!r}"
            for hook in tables_of(table_of(part, "verifier"), "collect"):
                if hook.get("service", "main") != "main":
                    yield f"{key}verifier.collect in the service {hook['service']!r}"

    def _misplaced_artifacts(self) -> Iterator[str]:
        """Yield artifacts that would be written outside the trial's folder, or through links that the task made there.

        Of nested ones, Harbor leaves out the second, unless both have one source or it is `/logs/artifacts`.
        """
        own = _artifacts(self.config)
        for entries in [own, *([*own, *_artifacts(step)] for step in self.steps)]:
            yield from (f"artifacts: {source} begins with two slashes" for source, to in entries if to.root == "//")
            listed = any(source == _ARTIFACTS for source, _ in entries)
            for (first, to), (second, into) in combinations(entries if listed else [_PUBLISHED, *entries], 2):
                unless_left_out = to != into if first == second else second == _ARTIFACTS
                if unless_left_out and (to.is_relative_to(into) or into.is_relative_to(to)):
                    yield f"artifacts: {first} and {second} have nested destinations"

    def _phase_networks(self) -> Iterator[str]:
        """Return network modes of single phases; a local sandbox keeps one mode from start to end."""
        baselines = {sandbox.key: sandbox.network for sandbox in self.sandboxes()}
        for key, phase in self._phases():
            mode, own = phase.get("network_mode"), baselines.get(f"{key}.environment", baselines["environment"])
            if mode is not None and mode != own:
                yield f'[{key}] network_mode = "{mode}" in a sandbox that has "{own}"'

    def closed_phases(self) -> set[str]:
        """Return the phases, `agent` or `verifier`, whose network is restricted in the task or in a step."""
        networks = {sandbox.key: sandbox.network for sandbox in self.sandboxes()}
        own = networks["environment"]
        return {
            role
            for key, part in self._parts()
            for role in ("agent", "verifier")
            if bool(key) == bool(self.steps)
            and table_of(part, role).get("network_mode", networks.get(f"{key}{role}.environment", own)) != "public"
        }

    def _other_users(self) -> Iterator[str]:
        """Return users other than root, which an ordinary user's sandbox does not have."""
        for key, phase in self._phases():
            if not is_root(user := phase.get("user")):
                yield f"[{key}] user = {user!r} ({_ROOT_ONLY})"

    def _phases(self) -> Iterator[tuple[str, TomlTable]]:
        """Yield the tables of agents and verifiers with their keys."""
        for key, part in self._parts():
            for role in ("agent", "verifier"):
                yield f"{key}{role}", table_of(part, role)

    def _parts(self) -> Iterator[tuple[str, TomlTable]]:
        """Yield the task and its steps, each with the prefix of its keys."""
        yield "", self.config
        yield from ((f"steps.{step['name']}.", step) for step in self.steps)

    def unset_variables(self, variables: Mapping[str, str], *, solution: bool = False) -> list[str]:
        """Return the variables that the task takes from this machine without a default and that are not set.

        Args:
            variables: This machine's environment variables.
            solution: Include the solution's variables.
        """
        found = [
            f"[{key}.env] {name}: ${variable} is not set"
            for key, name, variable, default in self._variables(solution=solution)
            if default is None and variable not in variables
        ]
        return list(dict.fromkeys(found))

    def _variables(self, *, solution: bool = False) -> Iterator[tuple[str, str, str, str | None]]:
        """Yield the variables that the task takes from this machine: table key, name inside, variable, default."""
        for key, env in self._env_tables(solution=solution):
            for name, value in env.items():
                if template := host_variables.template_variable(value):
                    yield key, name, template[0], template[1]

    def _env_tables(self, *, solution: bool) -> list[tuple[str, TomlTable]]:
        """Return the env tables, with the key of the table around each."""
        tables = [(sandbox.key, table_of(sandbox.table, "env")) for sandbox in self.sandboxes()]
        tables += [(f"{key}verifier", table_of(table_of(part, "verifier"), "env")) for key, part in self._parts()]
        return tables + ([("solution", table_of(table_of(self.config, "solution"), "env"))] if solution else [])

    @property
    def restricts_network(self) -> bool:
        """Whether a sandbox or phase of the task has a restricted network."""
        modes: list[str | None] = [sandbox.network for sandbox in self.sandboxes()]
        modes += [phase.get("network_mode") for _, phase in self._phases()]
        return any(mode not in (None, "public") for mode in modes)


def _artifacts(part: TomlTable) -> list[tuple[PurePosixPath, PurePosixPath]]:
    """Return the source and, below "/" as the trial's folder, the destination of each artifact."""
    found = part.get("artifacts")
    entries = [one if isinstance(one, dict) else {"source": one} for one in found] if isinstance(found, list) else []
    pairs = [(str(one.get("source")), str(one.get("destination") or one.get("source"))) for one in entries]
    return [(PurePosixPath(source), PurePosixPath("/").joinpath(to)) for source, to in pairs]


def _printable(text: str) -> str:
    """Return a text from a task's files without control characters, and not longer than a few lines."""
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_SHOWN])


def _has_default(value: object) -> bool:
    template = host_variables.template_variable(value)
    return template is not None and template[1] is not None


def _undefined(sandboxes: Sequence[RequestedSandbox]) -> list[str]:
    return [f"[{sandbox.key}] neither a Dockerfile nor docker_image" for sandbox in sandboxes if not sandbox.is_defined]


def _unsupported_anywhere(sandbox: RequestedSandbox) -> Iterator[str]:
    """Yield requirements that neither containers nor local sandboxes support."""
    yield from (f"{sandbox.folder.name}/{file.name} is not a regular file" for file in unreadable_files(sandbox.folder))
    if sandbox.table.get("tpu"):
        yield f"[{sandbox.key}] tpu"
    if str(sandbox.table.get("os", "linux")).lower() != "linux":
        yield f"[{sandbox.key}] os = {sandbox.table['os']!r}"


def _gpus(sandbox: RequestedSandbox, entry: EnvironmentEntry) -> list[str]:
    """Return the request for GPUs, unless Harbor's Docker grants it."""
    gpus = sandbox.table.get("gpus")
    granted = not gpus or (not entry.needs_namespaces and docker_allocates_gpus())
    return [] if granted else [f"[{sandbox.key}] gpus = {gpus}"]


def _image_user(sandbox: RequestedSandbox) -> Iterator[str]:
    """Yield the Dockerfile's last user if it is not root. The base image's user is checked after the build."""
    path = sandbox.folder / "Dockerfile"
    if not path.is_file():
        return
    with contextlib.suppress(SandboxBuildError):  # the builder reports the error
        users = [
            step for step in dockerfile.parse(dockerfile.read_dockerfile(sandbox.folder)).steps if step.name == "USER"
        ]
        if users and not is_root(users[-1].value):
            yield f"[{sandbox.key}] {users[-1]} ({_ROOT_ONLY})"


def _unsupported_on_rootfs(sandbox: RequestedSandbox, rootfs: Path) -> list[str]:
    image = sandbox.table.get("docker_image")
    try:
        return [f"[{sandbox.key}] {what}" for what in host_root_problems(sandbox.folder, image, rootfs)]
    except SandboxBuildError as error:
        return [str(error)]
