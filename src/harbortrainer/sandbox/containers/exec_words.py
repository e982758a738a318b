"""The words with which Harbor asks Compose to run a command in a service, or to copy files there."""

from dataclasses import dataclass, field

MAIN = "main"
_WITH_VALUE = ("-w", "-e", "-u")


@dataclass
class ServiceCommand:
    """A command in the main service. What is None is the container's own."""

    argv: list[str]
    cwd: str | None = None
    user: str = ""
    env: dict[str, str] = field(default_factory=dict)


def command_of(words: list[str]) -> ServiceCommand | None:
    """`exec [-T] [-w DIR] [-u USER] [-e NAME=VALUE]... main WORD...`; None for anything else."""
    asked, rest = ServiceCommand([]), words[1:] if words[:1] == ["exec"] else []
    while rest and rest[0] != MAIN:
        option, rest = rest[0], rest[1:]
        if option == "-T":
            continue
        if option not in _WITH_VALUE or not rest:
            return None
        value, rest = rest[0], rest[1:]
        if option == "-w":
            asked.cwd = value
        elif option == "-u":
            asked.user = value
        else:
            name, _, text = value.partition("=")
            asked.env[name] = text
    asked.argv = rest[1:]
    return asked if asked.argv else None


def upload_of(words: list[str]) -> tuple[str, str] | None:
    """What goes where, of `cp SOURCE main:TARGET`; None for anything else."""
    match words:
        case ["cp", source, target] if target.startswith(f"{MAIN}:"):
            return source, target.removeprefix(f"{MAIN}:")
    return None
