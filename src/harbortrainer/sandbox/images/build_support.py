"""What image builders share: the sandbox of RUN, registry settings, a lock for Dockerfiles with the same first lines.

RUN runs in a sandbox of this project (`inside.oci_runtime`), which buildah and podman start as their OCI runtime.

Builders resolve names as Docker does: a bare name is on Docker Hub, and logins come from `docker login`. The user's own
container settings (mirrors, insecure registries, `REGISTRY_AUTH_FILE`) take precedence.

Dockerfiles that share their first lines are built one after another. In parallel, each would build and store the shared
layers.
"""

import hashlib
import json
import os
import sys
import tomllib
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from harbortrainer.runs.locks import file_lock
from harbortrainer.sandbox.inside import oci_runtime
from harbortrainer.sandbox.network_choice import slirp4netns_path_async

_CONF = "CONTAINERS_REGISTRIES_CONF"
_AUTH, _DOCKER = "REGISTRY_AUTH_FILE", "DOCKER_CONFIG"
_DOCKER_HUB = 'unqualified-search-registries = ["docker.io"]\nshort-name-mode = "disabled"\n\n'


def parse_version(text: str) -> tuple[int, ...]:
    """Return major and minor version of a builder.

    Example:
        >>> parse_version("1.33.7-dev\\n")
        (1, 33)
    """
    return tuple(int(word) for word in text.strip().split("-")[0].split(".")[:2] if word.isdigit())


_RUNTIME = """#!/bin/sh
# OCI runtime of image builds: RUN runs in a sandbox. The working directory is the bundle.
[ "$1" = --systemd-cgroup ] && shift
case $1 in
create) exec '{python}' -I -S -c 'import sys; sys.path.insert(0, "{source}")
from harbortrainer.sandbox.inside import oci_runtime; oci_runtime.main(sys.argv[1:])' "$@" ;;
start) ;;
state)
  read -r pid < pid
  if kill -0 "$pid" 2>/dev/null; then status=running; else status=stopped; fi
  echo '{{"ociVersion": "1.0.2", "id": "'"$2"'", "status": "'"$status"'", "pid": '"$pid"', "bundle": "'"$PWD"'"}}' ;;
kill | delete) read -r pid < pid && kill -9 "$pid" 2>/dev/null; exit 0 ;;
*) echo "sandbox runtime: unknown command $1" >&2; exit 1 ;;
esac
"""
_SOURCE = Path(__file__).resolve().parents[3]


def write_runtime(folder: Path) -> Path:
    """Write the program that runs RUN in a sandbox into `folder`, unless it is there; return its path."""
    text = _RUNTIME.format(python=sys.executable, source=_SOURCE)
    path = folder / f"runtime-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")  # several processes may write it at once
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(path)
    return path


async def runtime_environment(network: str, context: Path, scratch: Path, stores: list[Path]) -> dict[str, str]:
    """Return the environment variable of that program.

    Args:
        network: The setting of the sandbox's network (`network_choice`).
        context: The build context.
        scratch: The builder's folder for temporary files, with the caches of `RUN --mount=type=cache`.
        stores: The builder's stores of images and containers. A container's folder has its volumes.
    """
    caches = (scratch / name for name in ("buildah-cache", f"buildah-cache-{os.geteuid()}"))
    containers = (store / "overlay-containers" for store in stores)
    settings = {
        "folders": [str(folder.resolve()) for folder in (context, *caches, *containers)],
        "stores": [str(store.resolve()) for store in stores],
        "slirp4netns_path": await slirp4netns_path_async(network),
    }
    return {oci_runtime.VARIABLE: json.dumps(settings)}


def builder_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables for a program that pulls. The files they name are written into `folder`."""
    found = {}
    if _CONF not in os.environ and (text := _with_docker_hub(_read_user_config())) is not None:
        path = folder / "registries.conf"
        if not path.is_file() or path.read_text() != text:
            draft = path.with_name(f".registries.{os.getpid()}")
            draft.write_text(text)
            draft.replace(path)
        found[_CONF] = str(path)
    if _AUTH not in os.environ and (docker_config := os.environ.get(_DOCKER)):
        login = Path(docker_config) / "config.json"
        # A builder fails on a configured folder without a login. It finds ~/.docker without the variable.
        found |= {_AUTH: str(login)} if login.is_file() else {_DOCKER: ""}
    return found


def _read_user_config() -> str:
    for path in (Path.home() / ".config/containers/registries.conf", Path("/etc/containers/registries.conf")):
        if path.is_file():
            return path.read_text()
    return ""


def _with_docker_hub(text: str) -> str | None:
    """Add Docker Hub as the default registry to the user's file; None if the file already sets one."""
    try:
        known = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None  # the builder reports the error
    if known.get("unqualified-search-registries") or known.get("registries"):
        return None
    lines = [
        line for line in text.splitlines() if not line.strip().startswith(("unqualified-search", "short-name-mode"))
    ]
    return _DOCKER_HUB + "\n".join(lines) + "\n"


def build_lock(folder: Path, text: str) -> AbstractAsyncContextManager[int]:
    """Hold the lock in `folder` that is shared by all Dockerfiles with the same first lines."""
    family = hashlib.sha256(_cache_prefix(text).encode()).hexdigest()[:16]
    return file_lock(folder / f".family-{family}.lock")


def _cache_prefix(text: str) -> str:
    """Return a Dockerfile up to its first line that creates a layer, without comments."""
    lines = [line.strip() for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    layer_lines = (number for number, line in enumerate(lines) if line.split()[0].upper() in ("RUN", "COPY", "ADD"))
    return "\n".join(lines[: next(layer_lines, len(lines)) + 1])
