"""Compose files of a task, read as data.

Compose accepts tags, such as `!reset`, and several documents; both are read here. Whatever else PyYAML does not
understand is an error, never an empty file. Harbor's Docker environment reads only `docker-compose.yaml`, some of its
providers `docker-compose.yml` too. A pipe or folder of that name counts as a compose file, but is never opened.
"""

import os
from pathlib import Path

import yaml

MAIN = "main"
"""Harbor's name for the service in which the agent works."""
NAME, PROVIDERS_NAME = "docker-compose.yaml", "docker-compose.yml"
_MAX_READ = 1_000_000
_MAX_NODES = 50_000


class ComposeFileError(ValueError):
    """A compose file that cannot be read."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # equally safe and ten times as fast
    """YAML with Compose's tags; a tagged value counts as if it had no tag."""


def _untagged(loader: yaml.SafeLoader, node: yaml.Node) -> object:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_scalar(node) if isinstance(node, yaml.ScalarNode) else None


for _tag in ("!reset", "!override"):
    _Loader.add_constructor(_tag, _untagged)


def compose_files(folder: Path, *, provider: bool = False) -> list[Path]:
    """Return the compose files in an environment's folder.

    Args:
        folder: The environment's folder.
        provider: Include the file name that only some providers read.
    """
    names = (NAME, PROVIDERS_NAME) if provider else (NAME,)
    return [folder / name for name in names if os.path.exists(f"{folder}/{name}")]  # noqa: PTH110 - thousands of tasks


def unreadable_files(folder: Path) -> list[Path]:
    """Return the compose file in an environment's folder if it is a pipe, folder or device."""
    return [file for file in compose_files(folder) if not file.is_file()]


def read_compose(file: Path) -> object:
    """Return the document of a compose file.

    Raises:
        ComposeFileError: The file is not UTF-8 or YAML, has several documents, or is too large with its aliases.
    """
    try:
        if not file.is_file():
            raise ComposeFileError("not a regular file")
        if file.stat().st_size > _MAX_READ:
            raise ComposeFileError(f"more than {_MAX_READ} bytes")
        loader = _Loader(file.read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if _size(node, {}) > _MAX_NODES:
                raise ComposeFileError(f"more than {_MAX_NODES} values")
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise ComposeFileError(" ".join(str(error).split())[:200]) from error


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values below a node, aliases written out; raises `ComposeFileError` for other types."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag == "tag:yaml.org,2002:binary":
            raise ComposeFileError("binary values are not read here")
        return 1
    if (size := known.get(id(node))) is not None:
        if not size:
            raise ComposeFileError("an alias contains itself")
        return size
    known[id(node)] = 0
    inside = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    known[id(node)] = size = 1 + sum(_size(part, known) for part in inside)
    return size


def read_text(file: Path) -> str:
    """Return the beginning of a regular file; "" for anything else, and for a file that cannot be read."""
    try:
        if not file.is_file():
            return ""
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(_MAX_READ)
    except (OSError, ValueError):
        return ""


def env_files(service: dict) -> list[str]:
    """Return the paths that a service has under `env_file`."""
    given = service.get("env_file")
    entries = given if isinstance(given, list) else [given]
    return [str(entry.get("path", "") if isinstance(entry, dict) else entry) for entry in entries if entry]


def as_mapping(found: object) -> dict:
    """Return the value if it is a mapping, else an empty one."""
    return found if isinstance(found, dict) else {}


def as_list(found: object) -> list:
    """Return the value if it is a list, else an empty one."""
    return found if isinstance(found, list) else []
