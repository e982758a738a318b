"""From a task's environment folder to the image that its sandboxes stand on; built once, then found by content.

The key is the hash of everything that goes in: the Dockerfile and its context, which root filesystem, who builds.
"""

import asyncio
import hashlib
import platform
from pathlib import Path
from typing import Any

from harbortrainer.sandbox import build, context, dockerfile
from harbortrainer.sandbox.errors import SandboxBuildError
from harbortrainer.sandbox.image import Image
from harbortrainer.sandbox.store import Store

_VERSION = "3"


class Layers:
    """Makes images for one root filesystem in one store."""

    def __init__(self, store: Store, rootfs: Path) -> None:
        self._store, self._rootfs = store, rootfs

    async def image(self, folder: Path, spec: dict[str, Any], mask: dict[str, Any] | None, seconds: float) -> Image:
        """The image of the Dockerfile in `folder`, a bare one when there is none.

        Args:
            spec: What the build's sandbox is like, as for `Guest.start`.
            seconds: The most that one step may take.

        Raises:
            SandboxBuildError: A step failed, or asks for what cannot be done; it names the step.
        """
        if not (folder / "Dockerfile").is_file():
            return Image()
        recipe = dockerfile.parse((folder / "Dockerfile").read_text())
        key = await asyncio.to_thread(self._key, folder, mask["shown"] if mask else [])

        async def fill(scratch: Path) -> None:
            await build.build(recipe, folder, scratch, spec, mask, seconds)

        return Image.load(await self._store.folder("layer", key, fill))

    def _key(self, folder: Path, shown: list[str]) -> str:
        parts = [
            _VERSION,
            self._store.flavour,
            platform.machine(),
            _identity(self._rootfs),
            context.digest(folder),
            *shown,
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def notices(folder: Path, rootfs: Path, docker_image: str | None) -> list[str]:
    """What of a task's environment a local sandbox does not honour, in words."""
    found: list[str] = []
    here = f"the sandbox stands on {rootfs} ({_name(rootfs)})"
    if docker_image:
        found.append(f"docker_image {docker_image!r} is not pulled; {here}")
    if (folder / ".dockerignore").is_file():
        found.append(".dockerignore is not read")
    if (folder / "Dockerfile").is_file():
        recipe = dockerfile.parse((folder / "Dockerfile").read_text())
        if recipe.base != "scratch":
            found.append(f"FROM {recipe.base} is not pulled; {here}")
        found += recipe.notices
    return found


def refuse(folder: Path, extra: list[Path]) -> None:
    """Raise SandboxBuildError for an environment of several containers."""
    compose = [folder / name for name in ("docker-compose.yaml", "docker-compose.yml") if (folder / name).is_file()]
    if files := [*compose, *extra]:
        names = ", ".join(path.name for path in files)
        raise SandboxBuildError(f"{names}: the local sandbox has no sidecars; use environment_type = 'docker'")


def _identity(rootfs: Path) -> str:
    info = rootfs.stat()
    marks = [f"{rootfs}:{info.st_dev}:{info.st_ino}", _name(rootfs)]
    for name in ("var/lib/dpkg/status", "lib/apk/db/installed", "var/lib/rpm"):
        path = rootfs / name
        marks.append(str(path.stat().st_mtime_ns) if path.exists() else "")
    return "\n".join(marks)


def _name(rootfs: Path) -> str:
    try:
        lines = (rootfs / "etc/os-release").read_text().splitlines()
    except OSError:
        return "no /etc/os-release"
    return next((line.partition("=")[2].strip('"') for line in lines if line.startswith("PRETTY_NAME=")), "unnamed")
