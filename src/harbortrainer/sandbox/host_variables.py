"""Environment variables of this machine that a task passes into its sandboxes.

Sources:

- `${VAR}`, `$VAR` and `${VAR:-default}` in the env tables of task.toml, and in any text of a compose file.
- Variables that a compose file names without a value.
- The files `.env` and `env_file`, in which Compose replaces variables too.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from harbortrainer.config.secret_names import is_secret
from harbortrainer.sandbox.compose_files import (
    ComposeFileError,
    as_list,
    as_mapping,
    compose_files,
    env_files,
    read_compose,
    read_text,
)

_REFERENCE = re.compile(r"\$(?:\$|\{?(?P<name>[A-Za-z_]\w*)(?P<default>:?[-+])?)")
_LINE = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)\s*$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)\s*[=:]", re.MULTILINE)
_HARBOR_TEMPLATE = re.compile(r"\$\{([^}:]+)(:-.*)?\}")
_STEERING = re.compile(
    r"(DOCKER|COMPOSE|BUILDX|BUILDKIT|LD|XDG|SSH|GIT|SSL)_\w+|GO[A-Z]+|PATH|HOME|TMPDIR|\w+_proxy", re.IGNORECASE
)
"""Variables that steer the programs `docker` and `git`; a task sets none of them."""
_DOCKERS_OWN = re.compile(r"DOCKER_(HOST|CONTEXT|CONFIG|CERT_PATH|TLS_VERIFY|AUTH_CONFIG)|\w+_proxy", re.IGNORECASE)
"""Variables that the program `docker` needs, even with a password inside."""

type Named = dict[str, bool]
"""Names of variables, each with whether every use of it has a default."""


def template_variable(value: object) -> tuple[str, str | None] | None:
    """Return variable and default of a value that Harbor replaces as a whole, such as `${KEY:-x}`; else None."""
    found = _HARBOR_TEMPLATE.fullmatch(str(value))
    return (found[1], found[2]) if found else None


def variables_of_text(text: str) -> Named:
    """Return the variables that a text refers to, also inside the default of another one.

    Example:
        >>> variables_of_text("Bearer ${TOKEN:-$OLD} $$HOME")
        {'TOKEN': True, 'OLD': False}
    """
    found: Named = {}
    for match in _REFERENCE.finditer(text):
        if name := match["name"]:
            found[name] = match["default"] is not None and match[0].startswith("${") and found.get(name, True)
    return found


def variables_of_env(env: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield each entry of an env table that names a variable of this machine, with that variable.

    Harbor replaces only a value that is one template. Compose also replaces variables inside a longer value.
    """
    for name, value in env.items():
        if template := template_variable(value):
            yield name, template[0]
        yield from ((name, variable) for variable in variables_of_text(str(value)))


def compose_variables(folder: Path, more: Sequence[Path] = (), *, provider: bool = False) -> Named:
    """Return the variables that Compose takes from this machine for the compose files of a folder, and for `more`."""
    found: Named = {}
    for file in [*compose_files(folder, provider=provider), *more]:
        try:
            project = as_mapping(read_compose(file))
        except ComposeFileError:
            _add(found, variables_of_text(read_text(file)))
            continue
        services = [as_mapping(service) for service in as_mapping(project.get("services")).values()]
        files = [folder / ".env", *(folder / path for service in services for path in env_files(service))]
        contents = [read_text(path) for path in files]
        for text in [*_texts(project), *contents]:
            _add(found, variables_of_text(text))
        bare = [name for service in services for name in _bare_names(service)]
        bare += [name for text in contents for name in _LINE.findall(text)]
        bare += [
            str(entry["environment"])
            for kind in ("secrets", "configs")
            for entry in map(as_mapping, as_mapping(project.get(kind)).values())
            if "environment" in entry
        ]
        _add(found, dict.fromkeys(bare, False))
        for name in _ASSIGNMENT.findall(read_text(folder / ".env")):
            if name in found and not steers(name):
                found[name] = True
    return found


def steers(name: str) -> bool:
    """Return whether a variable steers the programs that start containers, so that a task cannot set it for them."""
    return _STEERING.fullmatch(name) is not None


def exposed(named: Named, variables: Mapping[str, str], defined: Collection[str] = ()) -> list[str]:
    """Return the secrets among named variables, sorted. A secret with a default counts only if it is set here.

    Args:
        named: The variables.
        variables: This machine's environment variables.
        defined: Names that the task itself gives a value.
    """
    return sorted(
        name
        for name, has_default in named.items()
        if name not in defined and is_secret(name, variables.get(name, "")) and (name in variables or not has_default)
    )


def compose_environment(
    env: Mapping[str, str], host: Mapping[str, str], infra: Collection[str], named: Collection[str]
) -> dict[str, str]:
    """Return the environment of a Compose command, without secrets and without settings of programs from the task.

    Args:
        env: Harbor's environment of the command: the machine's, the task's and Harbor's own variables.
        host: This machine's environment variables.
        infra: Names of Harbor's own variables.
        named: Names that the task's files refer to. A secret among them stays: its task was allowed to have it.
    """
    own = {
        name
        for name, value in env.items()
        if name in infra or (name in named and (host.get(name) == value or not steers(name)))
    }
    machine = {name for name in host if _DOCKERS_OWN.fullmatch(name) or not is_secret(name, host[name])}
    return {name: env[name] if name in own else host[name] for name in env if name in own | machine}


def _add(found: Named, more: Named) -> None:
    for name, has_default in more.items():
        found[name] = has_default and found.get(name, True)


def _texts(node: object) -> Iterator[str]:
    """Yield every key and value of a document."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield str(key)
            yield from _texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value)
    elif isinstance(node, str):
        yield node


def _bare_names(service: dict) -> Iterator[str]:
    """Yield the variables that a service names without a value."""
    for table in (service.get("environment"), as_mapping(service.get("build")).get("args")):
        yield from (str(line) for line in as_list(table) if "=" not in str(line))
        yield from (str(name) for name, value in as_mapping(table).items() if value is None)
