"""Where images come from, as Docker sees it: a bare name is Docker Hub's, and logins are those of `docker login`.

What the user has set up for containers (mirrors, insecure registries, `REGISTRY_AUTH_FILE`) holds.
"""

import os
import tomllib
from pathlib import Path

_CONF = "CONTAINERS_REGISTRIES_CONF"
_AUTH, _DOCKER = "REGISTRY_AUTH_FILE", "DOCKER_CONFIG"
_DOCKER_HUB = 'unqualified-search-registries = ["docker.io"]\nshort-name-mode = "disabled"\n\n'


def variables(folder: Path) -> dict[str, str]:
    """The variables of a program that pulls; what they name is written into `folder`."""
    found = {}
    if _CONF not in os.environ and (text := _with_docker_hub(_users_file())) is not None:
        path = folder / "registries.conf"
        if not path.is_file() or path.read_text() != text:
            draft = path.with_name(f".registries.{os.getpid()}")
            draft.write_text(text)
            draft.replace(path)
        found[_CONF] = str(path)
    if _AUTH not in os.environ and (folder_of_docker := os.environ.get(_DOCKER)):
        login = Path(folder_of_docker) / "config.json"
        # Of a folder without a login a builder would say that it cannot be read; ~/.docker it finds by itself.
        found |= {_AUTH: str(login)} if login.is_file() else {_DOCKER: ""}
    return found


def _users_file() -> str:
    for path in (Path.home() / ".config/containers/registries.conf", Path("/etc/containers/registries.conf")):
        if path.is_file():
            return path.read_text()
    return ""


def _with_docker_hub(text: str) -> str | None:
    """The user's file with Docker Hub for names without a registry; None when it says itself where to look."""
    try:
        known = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None  # the builder says what is wrong with it
    if known.get("unqualified-search-registries") or known.get("registries"):
        return None
    kept = [
        line for line in text.splitlines() if not line.strip().startswith(("unqualified-search", "short-name-mode"))
    ]
    return _DOCKER_HUB + "\n".join(kept) + "\n"
