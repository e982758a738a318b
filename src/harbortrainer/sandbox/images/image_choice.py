"""Choice of a sandbox's root filesystem: the task's image, or the host's root (or another folder).

The setting is `environment_kwargs.image`. `auto` (the default) uses the task's image if a builder works, else the
host's root. `build` requires the image. `host` never uses a builder.

A task that needs more than the host's root offers is refused (`host_root_problems`); the doctor reports it before a
run.
"""

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from harbortrainer.sandbox import dockerfile
from harbortrainer.sandbox.errors_and_changes import SandboxBuildError
from harbortrainer.sandbox.images.buildah import Buildah
from harbortrainer.sandbox.images.container_engine import PROGRAMS, ContainerEngine, engine_problem
from harbortrainer.sandbox.images.image_cache import ImageBuilder
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.sandbox.task_image import Image

type ImageSetting = Literal["auto", "build", "host"]
type VerifierTools = Literal["agent", "image"]
INSTALL = (
    "install buildah (Debian: sudo apt-get install --no-install-recommends buildah)"
    if os.geteuid() == 0
    else "let this user talk to Docker (sudo usermod -aG docker USER, and log in again), or install podman"
)


def builder_for(setting: str, rootfs: Path, store: Store, network: str = "auto") -> ImageBuilder | None:
    """Return the builder for the task's image; None if the sandbox uses `rootfs`.

    Args:
        network: The network of RUN (`network_choice`).

    Raises:
        ValueError: The setting is unknown, contradicts `rootfs`, or requires a builder and none works.
    """
    settings = get_args(ImageSetting.__value__)
    if setting not in settings:
        raise ValueError(f"image = {setting!r}: use one of {', '.join(settings)}")
    if rootfs != Path("/") and setting == "build":
        raise ValueError(f"image = 'build' and rootfs = '{rootfs}' exclude each other; remove one of them")
    if rootfs != Path("/") or setting == "host":
        return None
    problem = builder_problem()
    if problem and setting == "build":
        raise ValueError(f"image = 'build', but {problem}: {INSTALL}")
    return None if problem else _builder(store, network)


def uses_image_tools(setting: str, task: str, system_tasks: Sequence[str]) -> bool:
    """Return whether the verifier of a task gets the system folders that the sandbox starts with.

    Args:
        setting: `agent` or `image`; ValueError for another one.
        task: The task's name.
        system_tasks: Names or patterns of tasks whose subject is the system itself.
    """
    if setting not in (settings := get_args(VerifierTools.__value__)):
        raise ValueError(f"verifier_tools = {setting!r}: use one of {', '.join(settings)}")
    return setting == "image" and not any(fnmatchcase(task, pattern) for pattern in system_tasks)


def builder_problem() -> str:
    """Describe why no image builder works on this machine; "" if one does."""
    problems = ["no image builder is available"]
    for check in (Buildah.problem, *(partial(engine_problem, program) for program in PROGRAMS)):
        if not (problem := check()):
            return ""
        problems += [] if problem.endswith(" is not installed") else [problem]
    return "; ".join(problems)


def _builder(store: Store, network: str) -> ImageBuilder:
    """Return the first builder that works; one must."""
    if not Buildah.problem():
        return Buildah(store.own / "buildah", network=network)
    return ContainerEngine(next(program for program in PROGRAMS if not engine_problem(program)), store, network)


def host_root_problems(folder: Path, docker_image: str | None, rootfs: Path = Path("/")) -> list[str]:
    """Describe what a task needs of its image and another root filesystem cannot provide.

    Args:
        folder: The task's environment folder.

    Raises:
        SandboxBuildError: Its Dockerfile is invalid.
    """
    if (folder / "Dockerfile").is_file():
        return dockerfile.parse(dockerfile.read_dockerfile(folder)).unsupported
    if docker_image and rootfs == Path("/"):
        return [f"docker_image {docker_image!r}"]
    return []


def require_host_root(folder: Path, docker_image: str | None, rootfs: Path) -> None:
    """Raise SandboxBuildError, with a remedy, if a task cannot run on the host's root."""
    if needs := host_root_problems(folder, docker_image, rootfs):
        root = "the host's root filesystem" if rootfs == Path("/") else str(rootfs)
        raise SandboxBuildError(f"{'; '.join(needs)}: not supported on {root}; {REMEDY}")


def is_root(user: str | int | None) -> bool:
    """Return whether a user, or `user:group`, is root with root's group; None is the default user."""
    return all(part in ("", "root", "0") for part in str("" if user is None else user).split(":"))


def require_root_user(image: Image) -> None:
    """Raise SandboxBuildError if an image's USER is not root and this process does not run as root."""
    if os.geteuid() != 0 and not is_root(image.user):
        raise SandboxBuildError(
            f"the image's USER is {image.user!r}: only root can give a sandbox other users; "
            "run as root, or use environment_type = 'docker'"
        )


REMEDY = f"set image = 'auto' and {INSTALL}, or use environment_type = 'docker'"
