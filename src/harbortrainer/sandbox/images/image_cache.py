"""Cache of task images: built or pulled once per content, and limited in size.

The record of an image (`image.json`) is stored in the layer store under a key: the hash of the Dockerfile and its
context, or of the pulled reference. The layers stay in the builder's store. For an unprivileged user, the merged small
layers are stored beside the record.

Above the size limit the least recently used images are removed first. Layers that several images share count once.
Invariant: an image that a running sandbox uses is never removed.
"""

import asyncio
import hashlib
import platform
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harbortrainer.runs.locks import file_lock
from harbortrainer.sandbox import dockerfile
from harbortrainer.sandbox.errors_and_changes import SandboxBuildError
from harbortrainer.sandbox.images import layers
from harbortrainer.sandbox.images.buildah import Buildah
from harbortrainer.sandbox.images.container_engine import PROGRAMS, ContainerEngine, is_installed
from harbortrainer.sandbox.images.layers import UnpackedLayers
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.sandbox.task_image import FILE, Image

IMAGE_KIND = "image"
IMAGE_PREFIX = "localhost/harbortrainer/"
_VERSION = "3"


class ImageBuilder(Protocol):
    """Builder of images: buildah or a container engine."""

    kind: str

    async def build(self, context: Path, name: str, seconds: float) -> Image:
        """Build the Dockerfile in a folder. Raises SandboxBuildError."""
        ...

    async def pull(self, reference: str, seconds: float) -> Image:
        """Return the image of that name, pulled if missing. Raises SandboxBuildError."""
        ...

    async def remove(self, name: str) -> None:
        """Remove an image that was built or pulled."""
        ...


async def get_image(folder: Path, reference: str | None, store: Store, builder: ImageBuilder, seconds: float) -> Image:
    """Return the image of a task from the cache; build or pull it if missing. Concurrent calls build it once.

    Args:
        folder: The task's environment folder.
        reference: The image to pull; None builds the Dockerfile.
        seconds: Timeout for building or pulling.

    Raises:
        SandboxBuildError: Building or pulling failed; the message has the end of the builder's output.
    """
    key = await image_key(folder, reference, builder)

    async def fill(scratch: Path) -> None:
        if reference:
            image = await builder.pull(reference, seconds)
        else:
            image = await builder.build(folder, IMAGE_PREFIX + key, seconds)
        image.name, image.builder = reference or folder.parent.name, builder.kind
        if store.flavour == "user":
            image.lowers = await asyncio.to_thread(layers.merge_small_layers, image.lowers, scratch / "upper/root")
            image.small = True
        image.save(scratch)

    return Image.load(await store.folder(IMAGE_KIND, key, fill, is_intact=_layers_exist))


async def image_key(folder: Path, reference: str | None, builder: ImageBuilder) -> str:
    """Return the key of a task's image in the store."""
    if reference is None and not (folder / "Dockerfile").is_file():
        raise SandboxBuildError(f"{folder} has no Dockerfile, and the task has no docker_image")
    content = f"docker_image {reference}" if reference else await asyncio.to_thread(dockerfile.context_digest, folder)
    return hashlib.sha256("\0".join((_VERSION, builder.kind, platform.machine(), content)).encode()).hexdigest()[:32]


def _layers_exist(record: Path) -> bool:
    """Return whether all layers of a record exist: the builder's store may have been cleaned up."""
    return all(Path(layer).is_dir() for layer in Image.load(record).lowers)


DEFAULT_LIMIT_GB = 20.0
GB = 10**9
LAYER_KIND = "layer"


@dataclass(frozen=True)
class CachedImage:
    """A builder's image (kind `image`) or a Dockerfile's layer on a root filesystem (kind `layer`)."""

    kind: str
    key: str
    name: str
    """The task that it was first built for, or the pulled reference."""
    used: float
    """Unix time of the last start of a sandbox from it."""
    builder: str
    """The program whose store also has it."""
    layers: dict[str, int]
    """Bytes by folder in the store."""

    @property
    def size(self) -> int:
        """Bytes, including shared layers."""
        return sum(self.layers.values())


class ImageCache:
    """The images in one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._buildah, self._unpacked = Buildah(store.own / "buildah"), UnpackedLayers(store)
        self._engines = {name: ContainerEngine(name, store) for name in PROGRAMS if is_installed(name)}

    def list_images(self) -> list[CachedImage]:
        """Return every image, least recently used first. Blocks."""
        sizes = self._layer_sizes()
        found = [
            self._read(record, sizes)
            for kind in (IMAGE_KIND, LAYER_KIND)
            for record in _records(self._store.own / kind)
        ]
        return sorted(found, key=lambda image: image.used)

    def size(self) -> int:
        """Return the bytes of all images and layers, including intermediate ones. Blocks."""
        own = {path: size for image in self.list_images() for path, size in image.layers.items()}
        return sum((own | self._layer_sizes()).values())

    async def shrink(self, limit: int) -> list[CachedImage]:
        """Remove the least recently used images until at most `limit` bytes remain. Return the removed images."""
        removed: list[CachedImage] = []
        async with file_lock(self._store.own / ".prune.lock"):
            await asyncio.to_thread(self._store.clear_unfinished)
            for image in await asyncio.to_thread(self.list_images):
                if await asyncio.to_thread(self.size) <= limit:
                    return removed
                if await self._remove(image):
                    removed.append(image)
            if await asyncio.to_thread(self.size) > limit:
                unneeded = self._unpacked.sizes().keys() - await asyncio.to_thread(self._needed_layers)
                await self._unpacked.remove_unneeded(unneeded, self._needed_layers)
                await self._buildah.prune(lambda: None if self._store.has_unfinished() else self._needed_layers())
        return removed

    def _needed_layers(self) -> set[str]:
        """Return the layer folders that images use."""
        return {path for image in self.list_images() for path in image.layers}

    def _layer_sizes(self) -> dict[str, int]:
        return self._buildah.layer_sizes() | self._unpacked.sizes()

    async def _remove(self, image: CachedImage) -> bool:
        async with self._store.unused(image.kind, image.key) as free:
            if free:
                await asyncio.to_thread(shutil.rmtree, self._store.own / image.kind / image.key, ignore_errors=True)
                if image.kind == IMAGE_KIND:
                    if builder := {Buildah.kind: self._buildah, **self._engines}.get(image.builder or Buildah.kind):
                        await builder.remove(IMAGE_PREFIX + image.key)
                    await self._unpacked.remove_unneeded(image.layers, self._needed_layers)
        return free

    def _read(self, record: Path, sizes: dict[str, int]) -> CachedImage:
        kind, image = record.parent.name, Image.load(record)
        own = {str(record): _file_bytes(record)} if image.layer or kind == LAYER_KIND else {}
        layers = own | {path: sizes[path] for path in image.lowers if path in sizes}
        return CachedImage(kind, record.name, image.name, record.stat().st_mtime, image.builder, layers)


def _records(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path for path in folder.iterdir() if path.name[0] != "." and (path / FILE).is_file())


def _file_bytes(folder: Path) -> int:
    infos = [path.lstat() for path in folder.rglob("*")]
    return sum(info.st_size for info in infos if stat.S_ISREG(info.st_mode))
