"""What a sandbox's root is: the task's image, made by a builder, or the host's root filesystem (or another folder).

`environment_kwargs.image` says: `auto` (the default) takes the task's image where a builder is at hand, and the host's
root where none is; `build` insists on the image; `host` never asks a builder. On the host's root a task that needs more
than that can give is refused (`beyond_host`), before a run by the doctor.
"""

import os
from pathlib import Path
from typing import Literal, get_args

from harbortrainer.sandbox import dockerfile
from harbortrainer.sandbox.images.buildah import Buildah
from harbortrainer.sandbox.images.built_image import ImageBuilder
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.sandbox.sandbox_errors import SandboxBuildError

type ImageSetting = Literal["auto", "build", "host"]
INSTALL = "install buildah (Debian: sudo apt-get install --no-install-recommends buildah)"


def builder_for(setting: str, rootfs: Path, store: Store) -> ImageBuilder | None:
    """Who makes the task's image; None where the sandbox stands on `rootfs`.

    Raises:
        ValueError: The setting is none of the three, or contradicts `rootfs`, or insists where no builder is.
    """
    settings = get_args(ImageSetting.__value__)
    if setting not in settings:
        raise ValueError(f"image = {setting!r}: use one of {', '.join(settings)}")
    if rootfs != Path("/") and setting == "build":
        raise ValueError(f"image = 'build' and rootfs = '{rootfs}' are two roots; leave one of them out")
    if rootfs != Path("/") or setting == "host":
        return None
    why = missing_for_a_builder()
    if why and setting == "build":
        raise ValueError(f"image = 'build', and {why}: {INSTALL}")
    return None if why else Buildah(store.own / "buildah")


def missing_for_a_builder() -> str:
    """What this machine lacks to make images, in words; "" when nothing."""
    if not Buildah.is_here():
        return "no builder of images is here"
    return "" if os.geteuid() == 0 else "images are built by root only"


def beyond_host(folder: Path, docker_image: str | None, rootfs: Path = Path("/")) -> list[str]:
    """What a task asks of its image that no other root filesystem can stand in for, in words.

    Args:
        folder: The task's environment folder.

    Raises:
        SandboxBuildError: Its Dockerfile is none.
    """
    if (folder / "Dockerfile").is_file():
        return dockerfile.parse((folder / "Dockerfile").read_text()).beyond
    if docker_image and rootfs == Path("/"):
        return [f"docker_image {docker_image!r}"]
    return []


def refuse_beyond_host(folder: Path, docker_image: str | None, rootfs: Path) -> None:
    """Raise SandboxBuildError, with what can be done, for a task that needs its image."""
    if needs := beyond_host(folder, docker_image, rootfs):
        root = "the host's root filesystem" if rootfs == Path("/") else str(rootfs)
        raise SandboxBuildError(f"{'; '.join(needs)}: {root} cannot stand in for that; {REMEDY}")


REMEDY = f"set image = 'auto' and {INSTALL}, or use environment_type = 'docker'"
