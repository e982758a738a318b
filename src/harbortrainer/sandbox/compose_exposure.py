"""Access to this machine that a task's compose files grant, found before anything starts.

Contract: the settings of a compose file are compared with lists of harmless ones. A setting that is not listed, or
whose value depends on a variable, counts as access. Harmless are named volumes, read-only mounts of the task's own
files, published ports, own networks, limits, and whatever stays inside the container. A path is followed through its
links first. Each finding starts with the service, volume or network.
"""

import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from harbortrainer.sandbox.compose_files import (
    MAIN,
    ComposeFileError,
    as_list,
    as_mapping,
    compose_files,
    env_files,
    read_compose,
    read_text,
)

_HARMLESS_KEYS = re.compile(
    r"""
    attach | blkio_config | build | cap_add | cap_drop | cgroup | command | configs | container_name |
    cpu_count | cpu_percent | cpu_period | cpu_quota | cpu_shares | cpus | cpuset | depends_on | deploy |
    develop | devices | dns | dns_opt | dns_search | domainname | entrypoint | env_file | environment | expose |
    extends | extra_hosts | gpus | group_add | healthcheck | hostname | image | init | ipc | isolation |
    label_file | labels | links | logging | mac_address | mem_limit | mem_reservation | mem_swappiness |
    memswap_limit | network_mode | networks | oom_score_adj | pid | pids_limit | platform | ports | post_start |
    pre_stop | privileged | profiles | pull_policy | pull_refresh_after | read_only | restart | runtime |
    scale | secrets | security_opt | shm_size | stdin_open | stop_grace_period | stop_signal | storage_opt |
    sysctls | tmpfs | tty | ulimits | user | volumes | volumes_from | working_dir
    """,
    re.VERBOSE,
)
_HARMLESS_BUILD_KEYS = re.compile(
    r"""
    additional_contexts | args | cache_from | context | dockerfile | dockerfile_inline | extra_hosts |
    isolation | labels | network | no_cache | platforms | provenance | pull | sbom | secrets | shm_size |
    target | ulimits
    """,
    re.VERBOSE,
)
_HARMLESS_PROJECT_KEYS = re.compile(r"version|name|services|volumes|networks|configs|secrets")
_CAPABILITIES = re.compile(
    r"""
    AUDIT_WRITE | CHOWN | DAC_OVERRIDE | FOWNER | FSETID | IPC_LOCK | KILL | MKNOD | NET_ADMIN |
    NET_BIND_SERVICE | NET_RAW | SETFCAP | SETGID | SETPCAP | SETUID | SYS_CHROOT | SYS_NICE
    """,
    re.VERBOSE,
)
"""Docker's default capabilities, and three that end at the container's own namespaces and limits."""
_OWN_NAMESPACE = {
    "network_mode": re.compile(r"none|bridge|default|service:[\w.-]+"),
    "pid": re.compile(r"service:[\w.-]+"),
    "ipc": re.compile(r"none|private|shareable|service:[\w.-]+"),
    "cgroup": re.compile(r"private"),
    "runtime": re.compile(r"runc|crun|runsc|nvidia"),
}
_DEVICE = re.compile(
    r"/dev/(nvidia[\w-]*|nvidia-caps/[\w-]+|dri|dri/[\w-]+|kfd)|(nvidia|amd|intel)\.com/[\w-]+=[\w:,-]+"
)
_LOGGING = (None, "json-file", "local", "none")
_HARBOR_SOURCE = re.compile(r"\$\{HOST_(?:VERIFIER_LOGS|AGENT_LOGS|ARTIFACTS)_PATH\}")
_HARBOR_TARGET = re.compile(r"\$\{ENV_(?:VERIFIER_LOGS|AGENT_LOGS|ARTIFACTS)_PATH\}")
_HARBOR_NAME = re.compile(r"(?:HOST|ENV)_(?:VERIFIER_LOGS|AGENT_LOGS|ARTIFACTS)_PATH|CONTEXT_DIR|MAIN_IMAGE_NAME")
_STEERING_LINE = re.compile(
    rf"^\s*(?:export\s+)?({_HARBOR_NAME.pattern}|(?:DOCKER|BUILDX|BUILDKIT|LD)_\w+|PATH|HOME)\s*[=:]", re.MULTILINE
)
_OWN_FOLDER = "${CONTEXT_DIR}"
_OWN_IMAGE = ("${MAIN_IMAGE_NAME}", "${COMPOSE_PROJECT_NAME}")
_REMOTE = ("docker-image://", "https://", "service:", "target:")
_PATH = re.compile(r"[./~$]")
_SCHEME = re.compile(r"[A-Za-z][\w+.-]*:")
_FALSE = (None, False, "false")


def compose_exposure(
    folder: Path, root: Path | None = None, defined: Collection[str] = (), *, provider: bool = False
) -> list[str]:
    """Describe the access that an environment's compose files grant.

    Args:
        folder: The environment's folder.
        root: The task's folder, whose files count as its own; by default `folder`.
        defined: Variables that task.toml gives to Compose.
        provider: Whether another environment type than Docker may read the files.
    """
    files = compose_files(folder, provider=provider)
    found = [f"[environment.env] {name} is a name of Harbor's own" for name in filter(_HARBOR_NAME.fullmatch, defined)]
    if files:
        found += [f".env sets {name}, which steers Compose" for name in _steering_names(folder / ".env")]
    for file in files:
        try:
            found += _Project(folder, root or folder).access(read_compose(file))
        except ComposeFileError as error:
            found.append(f"{file.name} cannot be read, so its access is unknown ({error})")
    return found


class _Project:
    """One compose file of a folder."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = Path(os.path.realpath(folder)), os.path.realpath(root)

    def access(self, document: object) -> Iterator[str]:
        """Describe the access that a document grants; none for an empty one."""
        if document is not None and not isinstance(document, dict):
            yield "the compose file is not a mapping"
        project = as_mapping(document)
        yield from (f"the compose file has {key!r}" for key in _unknown(project, _HARMLESS_PROJECT_KEYS))
        for name, service in as_mapping(project.get("services")).items():
            yield from (f"{name} {what}" for what in self._service(str(name), as_mapping(service)))
        for name, volume in as_mapping(project.get("volumes")).items():
            yield from (f"the volume {name} {what}" for what in _volume(as_mapping(volume)))
        for name, network in as_mapping(project.get("networks")).items():
            yield from (f"the network {name} {what}" for what in _network(as_mapping(network)))
        for kind in ("configs", "secrets"):
            for name, entry in as_mapping(project.get(kind)).items():
                path = as_mapping(entry).get("file")
                if path is not None and self._is_outside(path):
                    yield f"{kind[:-1]} {name} is the file {path} of this machine"

    def _service(self, name: str, service: dict) -> Iterator[str]:
        yield from (f"has {key!r}, which is not known to be harmless" for key in _unknown(service, _HARMLESS_KEYS))
        if service.get("privileged") not in _FALSE:
            yield "is privileged"
        for key, own in _OWN_NAMESPACE.items():
            value = service.get(key)
            if value not in (None, "") and not own.fullmatch(str(value)):
                yield f'has {key} = "{value}"'
        yield from _refused(
            service, "cap_add", lambda one: bool(_CAPABILITIES.fullmatch(_capability(one))), "the capabilities"
        )
        yield from _refused(
            service, "devices", lambda one: bool(_DEVICE.fullmatch(_device(one))), "the devices", _device
        )
        yield from _refused(service, "security_opt", _keeps_security, "security_opt")
        yield from _refused(
            service, "volumes_from", lambda one: not str(one).startswith("container:"), "the volumes of"
        )
        for hook in [*as_list(service.get("post_start")), *as_list(service.get("pre_stop"))]:
            if as_mapping(hook).get("privileged") not in _FALSE:
                yield "has a privileged hook"
        if (driver := as_mapping(service.get("logging")).get("driver")) not in _LOGGING:
            yield f"logs through {driver}"
        if str(service.get("oom_score_adj", 0)).startswith(("-", "$")):
            yield f"has oom_score_adj = {service['oom_score_adj']}"
        yield from self._files(service)
        yield from self._mounts(service)
        yield from self._build(name, service)

    def _files(self, service: dict) -> Iterator[str]:
        for path in env_files(service):
            if self._is_outside(path):
                yield f"has the variables in {path} of this machine"
        labels = service.get("label_file")
        for path in filter(None, labels if isinstance(labels, list) else [labels]):
            if self._is_outside(path):
                yield f"has the labels in {path} of this machine"
        if file := as_mapping(service.get("extends")).get("file"):
            yield f"extends {file}, which is not read here; write the service out"

    def _mounts(self, service: dict) -> Iterator[str]:
        mounts = service.get("volumes")
        if mounts is not None and not isinstance(mounts, list):
            yield "has volumes that are not a list"
        yield from filter(None, map(self._mount, as_list(mounts)))

    def _mount(self, mount: object) -> str:
        """Describe the access that a mount grants; "" for none."""
        settings = mount if isinstance(mount, dict) else _short_mount(str(mount or ""))
        kind, source = settings.get("type"), str(settings.get("source") or "")
        if kind in ("volume", "tmpfs", "image") and "$" not in source:
            return ""
        if kind != "bind":
            return f"has a mount that depends on a variable or has an unknown type: {mount}"
        if _HARBOR_SOURCE.fullmatch(source):
            return ""
        read_only = settings.get("read_only") in (True, "true")
        if self._is_outside(source):
            return f"{'can read' if read_only else 'can write'} {source} of this machine"
        if as_mapping(settings.get("bind")).get("propagation") not in (None, "private", "rprivate"):
            return f"shares the mounts below {source} with this machine"
        return "" if read_only else f"can write the task's own {source}, which later trials use (add `:ro`)"

    def _build(self, name: str, service: dict) -> Iterator[str]:
        given = service.get("build")
        build = given if isinstance(given, dict) else {"context": given or "."}
        yield from (
            f"has build.{key}, which is not known to be harmless" for key in _unknown(build, _HARMLESS_BUILD_KEYS)
        )
        lines = [str(line).partition("=")[2] for line in as_list(build.get("additional_contexts"))]
        more = [*as_mapping(build.get("additional_contexts")).values(), *lines]
        for path in [*_build_files(build), *more]:
            if not str(path).startswith(_REMOTE) and self._is_outside(path):
                yield f"is built from {path} of this machine"
        if build.get("network") not in (None, "none", "default"):
            yield f'has build.network = "{build["network"]}"'
        if any("type=local" in str(entry) for entry in as_list(build.get("cache_from"))):
            yield "has a build cache in a folder of this machine"
        yield from self._replaced_image(name, service)

    def _replaced_image(self, name: str, service: dict) -> Iterator[str]:
        """Yield an image that is built under a name of another's, from which later tasks may be built."""
        image = str(service.get("image") or "")
        builds = "build" in service or (name == MAIN and (self.folder / "Dockerfile").is_file())
        own = (*_OWN_IMAGE, Path(self.root).name.lower())
        if image and builds and not any(part in image for part in own):
            yield f"replaces the image {image} of this machine by its own build"

    def _is_outside(self, path: object) -> bool:
        """Whether a path leads out of the task's folder, also through a link."""
        text = str(path)
        text = f"{self.folder}{text.removeprefix(_OWN_FOLDER)}" if text.startswith(_OWN_FOLDER) else text
        if "$" in text.removeprefix(str(self.folder)) or text.startswith("~") or _SCHEME.match(text) or "\0" in text:
            return True
        return not Path(os.path.realpath(self.folder / text)).is_relative_to(self.root)


def _build_files(build: dict) -> list[str]:
    """Return the build context, and a Dockerfile outside of the default place."""
    context, file = str(build.get("context", ".")), build.get("dockerfile")
    return (
        [context]
        if file is None or context.startswith(_REMOTE)
        else [context, posixpath.normpath(posixpath.join(context, str(file)))]
    )


def _steering_names(file: Path) -> list[str]:
    """Return the variables of a `.env` file that change what Harbor's variables mean, or which daemon is used."""
    return _STEERING_LINE.findall(read_text(file))


def _unknown(table: dict, known: re.Pattern[str]) -> list[str]:
    """Return the keys that are neither known nor Compose's `x-` extensions nor without a value."""
    keys = [str(key) for key, value in table.items() if value]
    return [key for key in keys if not known.fullmatch(key) and not key.startswith("x-")]


def _refused(
    service: dict,
    key: str,
    is_harmless: Callable[[object], bool],
    called: str,
    shown: Callable[[object], str] = str,
) -> Iterator[str]:
    """Describe the entries of a list that are not harmless, and a value that is no list."""
    value = service.get(key)
    if value is not None and not isinstance(value, list):
        yield f"has {called} {value}"
    if refused := [shown(one) for one in as_list(value) if not is_harmless(one)]:
        yield f"has {called} {', '.join(sorted(refused))}"


def _capability(name: object) -> str:
    return str(name).upper().removeprefix("CAP_")


def _device(device: object) -> str:
    text = str(device.get("source", "") if isinstance(device, dict) else device)
    return text if "=" in text else text.partition(":")[0]


def _keeps_security(option: object) -> bool:
    return bool(re.fullmatch(r"no-new-privileges([:=]true)?", str(option)))


def _short_mount(text: str) -> dict:
    """Return a mount in its long form, without a type if it depends on a variable other than Harbor's."""
    plain = _HARBOR_TARGET.sub("/logs", _HARBOR_SOURCE.sub("@", text))
    plain = f"%{plain.removeprefix(_OWN_FOLDER)}" if plain.startswith(_OWN_FOLDER) else plain
    if "$" in plain:
        return {}
    source, *rest = plain.split(":")
    source = {"@": "${HOST_VERIFIER_LOGS_PATH}", "%": _OWN_FOLDER}.get(source[:1], source[:1]) + source[1:]
    options = rest[1].split(",") if len(rest) > 1 else []
    return {
        "type": "bind" if rest and _PATH.match(source) else "volume",
        "source": source,
        "read_only": "ro" in options,
        "bind": {"propagation": next((one for one in options if one.endswith(("shared", "slave"))), None)},
    }


def _volume(volume: dict) -> Iterator[str]:
    if volume.get("external") not in _FALSE or volume.get("name"):
        yield "is shared by all trials"
    options = as_mapping(volume.get("driver_opts"))
    if volume.get("driver") not in (None, "local"):
        yield f"has the driver {volume['driver']}"
    if options and (options.get("type") != "tmpfs" or "$" in str(options)):
        yield f"is {options.get('device') or options} of this machine"


def _network(network: dict) -> Iterator[str]:
    if network.get("external") not in _FALSE or network.get("name"):
        yield "is shared by all trials"
    if network.get("driver") not in (None, "bridge"):
        yield f"has the driver {network['driver']}"
    if options := set(as_mapping(network.get("driver_opts"))) - {"com.docker.network.driver.mtu"}:
        yield f"has the options {', '.join(sorted(map(str, options)))}"
