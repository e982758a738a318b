"""Unpacked image layers of Docker or podman, and the merging of small layers for an unprivileged user.

A layer is unpacked once and identified by the digest of its content. Its folder has `files`, which an overlay can
mount, and `bytes`, their size. Invariant: a folder under its digest is complete. It is not removed while a caller holds
it or an image record names it.

An unprivileged overlay breaks hard links on write, since only root may use the index that prevents it. Therefore the
small layers on top of an image, which hold most of a task's own files, are merged and copied into each sandbox.
Invariant: the merged layer on top of the remaining ones shows the same files as all layers together.
"""

import asyncio
import os
import re
import shutil
import stat
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path

from harbortrainer.sandbox.errors_and_changes import SandboxBuildError
from harbortrainer.sandbox.images.layer_archive import is_folder
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.sandbox.task_image import SMALL_BYTES, SMALL_ENTRIES

_KIND = "unpacked"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class UnpackedLayers:
    """Unpacked layers in one store."""

    def __init__(self, store: Store) -> None:
        self._store, self._folder = store, store.own / _KIND

    async def files(self, digest: str, unpack: Callable[[Path], Awaitable[int]]) -> str:
        """Return the folder of a layer's files. The store keeps it locked until it releases the layer.

        Args:
            unpack: Fills an empty folder with the files and returns their bytes. Called only if they are missing.
        """
        if not (found := _DIGEST.fullmatch(digest)):
            raise SandboxBuildError(f"{digest!r} is not a layer digest")
        # Mode 700: other users of this machine must not run an image's set-uid programs.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

        async def fill(scratch: Path) -> None:
            (scratch / "files").mkdir(mode=0o755)
            (scratch / "bytes").write_text(str(await unpack(scratch / "files")))

        return str(await self._store.folder(_KIND, found[1], fill) / "files")

    def has(self, digest: str) -> bool:
        """Return whether the layer is unpacked."""
        return (self._folder / digest.removeprefix("sha256:") / "files").is_dir()

    def sizes(self) -> dict[str, int]:
        """Return bytes by folder of files."""
        found = self._folder.glob("[0-9a-f]*/bytes")
        return {str(path.with_name("files")): int(path.read_text()) for path in found}

    async def remove_unneeded(self, among: Iterable[str], needed: Callable[[], set[str]]) -> None:
        """Remove the folders in `among` that no caller holds and no image needs.

        Args:
            needed: Returns the folders that images need. Called while the folders in `among` are locked.
        """
        async with AsyncExitStack() as locks:
            free = []
            for files in among:
                layer = Path(files).parent
                if layer.parent == self._folder and await locks.enter_async_context(
                    self._store.unused(_KIND, layer.name)
                ):
                    free.append(files)
            kept = await asyncio.to_thread(needed) if free else set()
            for files in set(free) - kept:
                await asyncio.to_thread(shutil.rmtree, Path(files).parent)


_OPAQUE = "user.overlay.opaque"


def merge_small_layers(lowers: Sequence[str], target: Path) -> list[str]:
    """Merge the small layers on top into the new folder `target`, if there are any.

    Args:
        lowers: Layer folders, topmost first, on the same filesystem as `target`.

    Returns:
        The remaining lower layers, at least the lowest.
    """
    small = _count_small_layers(lowers)
    for layer in reversed(lowers[:small]):
        target.mkdir(parents=True, exist_ok=True)
        _merge_layer(Path(layer), target)
    if small:
        _drop_unneeded_whiteouts(target, [Path(layer) for layer in lowers[small:]])
    return list(lowers[small:])


def _count_small_layers(lowers: Sequence[str]) -> int:
    """Count the topmost layers that are together within the size limits for copying."""
    entries = size = 0
    for number, layer in enumerate(lowers[:-1]):
        infos = [path.lstat() for path in islice(Path(layer).rglob("*"), SMALL_ENTRIES - entries + 1)]
        entries += len(infos)
        size += sum(info.st_size for info in infos if not stat.S_ISDIR(info.st_mode))
        if entries > SMALL_ENTRIES or size > SMALL_BYTES:
            return number
    return max(0, len(lowers) - 1)


def _merge_layer(source: Path, target: Path) -> None:
    """Merge a layer on top of the target. Files and whiteouts are hard-linked, since they are never written."""
    for path in source.iterdir():
        place = target / path.name
        if not is_folder(path):
            _remove(place)
            os.link(path, place, follow_symlinks=False)
            continue
        hides = _OPAQUE in os.listxattr(path) or (os.path.lexists(place) and not is_folder(place))
        if hides:
            _remove(place)
        place.mkdir(exist_ok=True)
        if hides:
            os.setxattr(place, _OPAQUE, b"y")
        _merge_layer(path, place)
        shutil.copystat(path, place)


def _drop_unneeded_whiteouts(folder: Path, below: list[Path]) -> None:
    """Remove whiteouts of files that no lower layer has: a folder without lower layers would list them."""
    info = folder.stat()
    if _OPAQUE in os.listxattr(folder):
        below = []
    for path in list(folder.iterdir()):
        if is_folder(path):
            _drop_unneeded_whiteouts(path, [low / path.name for low in below if is_folder(low / path.name)])
        elif stat.S_ISCHR(path.lstat().st_mode) and not any(os.path.lexists(low / path.name) for low in below):
            path.unlink()
    os.utime(folder, ns=(info.st_atime_ns, info.st_mtime_ns))


def _remove(place: Path) -> None:
    if is_folder(place):
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
