"""Access to this machine and to other trials that a task gives its sandboxes, found before a model runs there.

- `compose_exposure`: folders, devices, namespaces, capabilities and variables that a compose file grants. Each finding
  starts with the service or volume. It leaves out Harbor's own mounts, read-only mounts of the task's folder and the
  variables of sidecars. An invalid compose file yields nothing; Compose reports the error when it starts.
- `named_ports`: ports that the instruction, tests, solution or a step name as this machine's (`localhost:8080`,
  `--port 8080`), not those in prose. If sandboxes share this machine's network (`network_choice`), the second of two
  concurrent trials cannot listen on such a port, and the first one's server answers its tests.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from harbortrainer.config.redacted_config import SECRET
from harbortrainer.sandbox.containers.shell import MAIN

_FILES = ("docker-compose.yaml", "docker-compose.yml")
_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # equally safe and ten times as fast
_HARBOR_VARIABLE = "${HOST_"
_OWN_FOLDER = "${CONTEXT_DIR}"
_NAMESPACES = ("network_mode", "pid", "ipc", "uts", "userns_mode", "cgroup")
_CAPABILITIES = {"ALL", "DAC_READ_SEARCH", "SYS_ADMIN", "SYS_MODULE", "SYS_PTRACE", "SYS_RAWIO"}
_GRAPHICS = ("/dev/nvidia", "/dev/dri", "/dev/kfd")
_VARIABLE = re.compile(r"\$\{?(\w+)")
_PART = re.compile(r"(?:\$\{[^}]*\}|[^:])+")
_PATH = re.compile(r"[./~$]")


def compose_files(folder: Path) -> list[Path]:
    """Return the compose files in an environment's folder."""
    return [folder / name for name in _FILES if (folder / name).is_file()]


def compose_exposure(folder: Path) -> list[str]:
    """Describe the access that an environment's compose files grant."""
    return [what for file in compose_files(folder) for what in _project_exposure(_mapping(_read_yaml(file)))]


def _read_yaml(file: Path) -> object:
    try:
        return yaml.load(file.read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _project_exposure(project: dict) -> Iterator[str]:
    services = _mapping(project.get("services"))
    for name, service in services.items():
        yield from (f"{name} {what}" for what in _service_exposure(_mapping(service)))
    yield from (f"{MAIN} {what}" for what in _variable_exposure(_mapping(services.get(MAIN))))
    for name, volume in _mapping(project.get("volumes")).items():
        settings = _mapping(volume)
        if settings.get("external") or settings.get("name"):
            yield f"the volume {name} is shared by all trials"
        if device := _mapping(settings.get("driver_opts")).get("device"):
            yield f"the volume {name} is {device} of this machine"


def _service_exposure(service: dict) -> Iterator[str]:
    if service.get("privileged") is True:
        yield "is privileged"
    yield from (f'has {key} = "host"' for key in _NAMESPACES if service.get(key) == "host")
    if capabilities := sorted(
        _CAPABILITIES & {str(name).upper().removeprefix("CAP_") for name in _list(service.get("cap_add"))}
    ):
        yield f"has the capabilities {', '.join(capabilities)}"
    devices = [str(device).partition(":")[0] for device in _list(service.get("devices"))]
    yield from (f"has {name}" for name in devices if name.startswith("/dev/") and not name.startswith(_GRAPHICS))
    yield from filter(None, map(_mount_exposure, _list(service.get("volumes"))))


def _variable_exposure(main: dict) -> Iterator[str]:
    keys = sorted(filter(SECRET.search, _host_variables(main.get("environment"))))
    yield from (f"has the variable {key} of this machine" for key in keys)
    named = main.get("env_file")
    for file in named if isinstance(named, list) else [named]:
        path = str(file.get("path", "") if isinstance(file, dict) else file or "")
        if _leaves_task(path):
            yield f"has the variables in {path} of this machine"


def _leaves_task(path: str) -> bool:
    """Whether a path leads out of the task's folder."""
    return posixpath.normpath(path.replace(_OWN_FOLDER, ".")).startswith(("/", "~", "$", ".."))


def _host_variables(environment: object) -> set[str]:
    """Return the machine's variables that are passed on: named without a value, or used in a value."""
    lines = [str(line).partition("=") for line in _list(environment)]
    given = [(name, value if equals else None) for name, equals, value in lines] or _mapping(environment).items()
    return {name for key, value in given for name in ([str(key)] if value is None else _VARIABLE.findall(str(value)))}


def _mount_exposure(mount: object) -> str:
    """Describe the access that a mount grants; "" for none."""
    source, read_only = _bind_source(mount)
    if not source or source.startswith(_HARBOR_VARIABLE):
        return ""
    if _leaves_task(source):
        return f"{'can read' if read_only else 'can write'} {source} of this machine"
    return "" if read_only else f"can write the task's own {source}, which later trials use"


def _bind_source(mount: object) -> tuple[str, bool]:
    """Return the mounted path of the machine, "" for none, and whether the mount is read-only."""
    if isinstance(mount, dict):
        source = str(mount.get("source", "")) if mount.get("type") == "bind" else ""
        return source, mount.get("read_only") is True
    source, *rest = _PART.findall(str(mount)) or [""]
    options = rest[1].split(",") if len(rest) > 1 else []
    return (source if rest and _PATH.match(source) else ""), "ro" in options


def _mapping(found: object) -> dict:
    return found if isinstance(found, dict) else {}


def _list(found: object) -> list:
    return found if isinstance(found, list) else []


_TASK_FILES = ("instruction.md", "tests", "solution", "steps")
_MAX_READ_B = 1_000_000
_PORT = re.compile(
    rb"""(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1?\])["']?\s*[:,]\s*["']?(\d{4,5})\b|--port[ =](\d{4,5})\b"""
)


def named_ports(task: Path) -> list[int]:
    """Return the ports that a task's files name as this machine's, sorted."""
    found = {
        int(port)
        for file in _files_with_ports(task)
        for pair in _PORT.findall(_read_file(file))
        for port in pair
        if port
    }
    return sorted(port for port in found if 1024 <= port < 65536)


def _files_with_ports(task: Path) -> Iterator[Path]:
    for name in _TASK_FILES:
        yield from [task / name, *(task / name).rglob("*")]


def _read_file(file: Path) -> bytes:
    """Return the first megabyte of a file; nothing for a link or a folder."""
    if file.is_symlink() or not file.is_file():
        return b""
    try:
        with file.open("rb") as opened:
            return opened.read(_MAX_READ_B)
    except OSError:
        return b""
