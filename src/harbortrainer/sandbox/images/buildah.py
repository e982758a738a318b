"""buildah as image builder, with its own store in a folder of this project.

Contract: an image is returned as a `task_image.Image` whose `lowers` are its layer folders in the store. Images in the
user's system store of buildah and podman can serve as base images; nothing is written there.

Invariant: the remains of a killed build (a partial layer, a working container) never become part of an image. The next
build that starts while no other runs removes them.
"""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import batched
from pathlib import Path
from typing import TypedDict

from harbortrainer.runs.locks import file_lock, try_lock
from harbortrainer.sandbox.dockerfile import inline_heredocs, normalize_heredocs, read_dockerfile
from harbortrainer.sandbox.errors_and_changes import SandboxBuildError
from harbortrainer.sandbox.images import build_support
from harbortrainer.sandbox.images.build_support import build_lock
from harbortrainer.sandbox.images.child_process import Output, run_child
from harbortrainer.sandbox.images.image_config import image_from_config
from harbortrainer.sandbox.task_image import Image

SYSTEM_STORE = Path("/var/lib/containers/storage")
# The sandbox brings a network of its own.
_BUILD_OPTIONS = ("--isolation", "oci", "--network", "host", "--layers", "--format", "docker")
_MAX_BUILDS = 4
_QUERY_S = 60.0
_HEREDOC_VERSION = (1, 33)
_LAYER_UNKNOWN = "layer not known"
_REMOVAL_BATCH = 100
"""Maximum number of images that one command removes."""

_Stored = TypedDict(
    "_Stored", {"id": str, "layer": str, "parent": str, "names": list[str], "diff-size": int}, total=False
)
"""The fields used here of an image or layer in the lists of containers/storage."""


class Buildah:
    """Builder that runs buildah on the store in `folder`."""

    kind = "buildah"

    def __init__(self, folder: Path, system_store: Path = SYSTEM_STORE, network: str = "auto") -> None:
        self.folder, self._system_store, self._network = folder, system_store, network

    @staticmethod
    def problem() -> str:
        """Describe why buildah cannot be used; "" if it can."""
        if not all(shutil.which(program) for program in ("buildah", "setpriv", "unshare")):
            return "buildah is not installed"
        return "" if os.geteuid() == 0 else "buildah is only used as root"

    async def build(self, context: Path, name: str, seconds: float) -> Image:
        """Build the Dockerfile of a folder.

        Raises:
            SandboxBuildError: The build failed; the message has the step and the end of the output.
        """
        text = await asyncio.to_thread(read_dockerfile, context)
        async with build_lock(self.folder, text), self._build_slot() as slot:
            dockerfile = await self._prepare_dockerfile(context / "Dockerfile", text, slot)
            runtime = await asyncio.to_thread(build_support.write_runtime, self.folder)
            arguments = (*_BUILD_OPTIONS, "--runtime", str(runtime), "-f", str(dockerfile), "-t", name, str(context))
            stores = [self.folder / "store", self.folder / "run", self._system_store]
            env = await build_support.runtime_environment(self._network, context, self.folder / "tmp", stores)
            result = await self._run("build", *arguments, seconds=seconds, env=env)
            if result.code and _LAYER_UNKNOWN in result.tail:
                # A cached build refers to layers that were removed from the system store.
                result = await self._run("build", "--no-cache", *arguments, seconds=seconds, env=env)
            if result.code:
                raise SandboxBuildError(f"the Dockerfile cannot be built: {result.tail}")
            return await self._inspect_image(name)

    async def pull(self, reference: str, seconds: float) -> Image:
        """Return the image of that name, from the local store or its registry.

        Raises:
            SandboxBuildError: It cannot be pulled.
        """
        async with self._build_slot():
            result = await self._run("pull", "--policy", "missing", reference, seconds=seconds)
            if result.code:
                raise SandboxBuildError(f"docker_image {reference!r} cannot be pulled: {result.tail}")
            return await self._inspect_image(reference)

    async def _inspect_image(self, name: str) -> Image:
        """Read an image from the store. Call it within `_build_slot`, since `_clean_up` removes scratch files."""
        result = await self._run("inspect", "--type", "image", name, seconds=_QUERY_S)
        if result.code:
            raise SandboxBuildError(f"image {name!r} cannot be read: {result.tail}")
        found = json.loads(result.out)
        image = image_from_config(found["Docker"]["config"], found["Docker"].get("history") or ())
        image.lowers = self._layer_folders(found["FromImageID"])
        return image

    async def remove(self, name: str) -> None:
        """Remove an image and its unshared layers from the store. A missing image is no error."""
        if self._store_exists:
            await self._run("rmi", "--force", name, seconds=_QUERY_S)

    async def prune(self, needed: Callable[[], set[str] | None]) -> None:
        """Remove intermediate images, which no cached image needs. Does nothing while a build runs.

        Args:
            needed: Returns the layer folders in use; None while an image is unfinished. Called while new builds are
                locked out.
        """
        if not self._store_exists:
            return
        async with self._exclusive_lock() as exclusive:
            in_use = await asyncio.to_thread(needed) if exclusive else None
            if in_use is None:
                return
            await self._clean_up()  # a container that a build left has a layer of its own
            for batch in batched(self._broken_images(), _REMOVAL_BATCH):  # `--prune` stops at a broken image
                await self._run("rmi", "--force", *batch, seconds=_QUERY_S)
            await self._run("rmi", "--prune", "--force", seconds=_QUERY_S)
            for item in self._read_store_list("overlay-images/images.json"):
                if item.get("names") and str(self._layer_folder(item["layer"])) not in in_use:
                    await self.remove(item["id"])

    def _broken_images(self) -> list[str]:
        """Return the images with missing layers, newest first. The user may have removed layers of the system store.

        Removing an image also removes its parents, as far as they can be traced; therefore the newest come first.
        """
        layers = [layer for root in self._roots for layer in _read(root / "overlay-layers" / "layers.json")]
        below = {layer["id"]: layer.get("parent") for layer in layers}

        def is_whole(layer: str | None) -> bool:
            while layer:
                if layer not in below:
                    return False
                layer = below[layer]
            return True

        images = reversed(self._read_store_list("overlay-images/images.json"))
        return [item["id"] for item in images if not is_whole(item.get("layer"))]

    def layer_sizes(self) -> dict[str, int]:
        """Return the layers in the store: bytes by folder."""
        listed = self._read_store_list("overlay-layers/layers.json")
        return {str(self._layer_folder(item["id"])): item.get("diff-size") or 0 for item in listed}

    @property
    def _store_exists(self) -> bool:
        return (self.folder / "store").is_dir()

    def _layer_folder(self, layer: str) -> Path:
        return self.folder / "store" / "overlay" / layer / "diff"

    def _read_store_list(self, name: str) -> list[_Stored]:
        return _read(self.folder / "store" / name)

    async def _prepare_dockerfile(self, dockerfile: Path, text: str, slot: int) -> Path:
        """Return the Dockerfile, or a copy in syntax that this version of buildah supports."""
        if "<<" not in text:
            return dockerfile
        supported = await self._version() >= _HEREDOC_VERSION
        copy = self.folder / f"Dockerfile.{slot}"
        await asyncio.to_thread(copy.write_text, normalize_heredocs(text) if supported else inline_heredocs(text))
        return copy

    async def _version(self) -> tuple[int, ...]:
        result = await self._run("version", "--json", seconds=_QUERY_S)
        return build_support.parse_version(json.loads(result.out)["version"]) if result.code == 0 else ()

    async def _run(self, *arguments: str, seconds: float, env: Mapping[str, str] | None = None) -> Output:
        store = ("--root", str(self.folder / "store"), "--runroot", str(self.folder / "run"))
        if (self._system_store / "overlay-images").is_dir():
            store = (*store, "--storage-opt", f"overlay.imagestore={self._system_store}")
        scratch = self.folder / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        variables = {"TMPDIR": str(scratch), **build_support.builder_environment(self.folder), **(env or {})}
        return await run_child(["buildah", *store, *arguments], env=variables, seconds=seconds)

    @asynccontextmanager
    async def _build_slot(self) -> AsyncGenerator[int]:
        """Take one of `_MAX_BUILDS` slots. If no other build runs, first remove the remains of killed builds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        locks = [self.folder / f".building{number}.lock" for number in range(_MAX_BUILDS)]
        with (self.folder / ".building.lock").open("a") as file:
            async with file_lock(self.folder / ".tidying.lock"):
                if try_lock(file):
                    await self._clean_up()
                try_lock(file, shared=True)
            async with file_lock(*locks) as index:
                yield index

    @asynccontextmanager
    async def _exclusive_lock(self) -> AsyncGenerator[bool]:
        """Yield whether no build runs; no build starts before this block ends."""
        async with file_lock(self.folder / ".tidying.lock"):
            with (self.folder / ".building.lock").open("a") as file:
                yield try_lock(file)

    async def _clean_up(self) -> None:
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)
        containers = self.folder / "store" / "overlay-containers" / "containers.json"
        if containers.is_file() and containers.read_text().strip() not in ("", "[]", "null"):
            await self._run("rm", "--all", seconds=_QUERY_S)

    def _layer_folders(self, image_id: str) -> list[str]:
        """Return an image's layer folders, topmost first, as containers/storage lists them for its own mounts."""
        for root in self._roots:
            images = root / "overlay-images" / "images.json"
            known: dict[str, _Stored] = {item["id"]: item for item in _read(images)}
            if image_id in known:
                top = self._find_layer(known[image_id]["layer"])
                below = (top / "lower").read_text().split(":") if (top / "lower").is_file() else []
                return [str(top / "diff"), *(str(self._find_layer(link)) for link in below)]
        raise SandboxBuildError(f"image {image_id} has no overlay layers in the image store")

    def _find_layer(self, name: str) -> Path:
        """Return a layer's folder in either store, by the layer's id or a link name of the store."""
        paths = [root / "overlay" / name for root in self._roots]
        found = next((path.resolve() for path in paths if path.exists()), None)
        if found is None:
            raise SandboxBuildError(
                f"layer {name} is missing from the image store; it may have been cleaned up meanwhile"
            )
        return found

    @property
    def _roots(self) -> tuple[Path, Path]:
        return self.folder / "store", self._system_store


def _read(path: Path) -> list[_Stored]:
    return json.loads(path.read_text()) if path.is_file() else []
