"""`harbortrainer images`: list and prune the image cache of local sandboxes."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from harbortrainer.errors import UserError
from harbortrainer.sandbox.images.image_cache import GB, CachedImage, ImageCache
from harbortrainer.sandbox.layer_store import Store

_KINDS = {"image": "image", "layer": "layer on a root filesystem"}


def list_images(cache_dir: Path | None) -> None:
    """Print the cached images and layers, least recently used first."""
    store = _store(cache_dir)
    cache = ImageCache(store)
    found = cache.list_images()
    _print(found)
    print(f"{len(found)} cached, {cache.size() / GB:.2f} GB in {store.own} (shared layers count once)")


def prune_images(cache_dir: Path | None, to_gb: float) -> None:
    """Remove the least recently used images until at most `to_gb` GB remain. Those in use are kept."""
    cache = ImageCache(_store(cache_dir))
    removed = asyncio.run(cache.shrink(int(to_gb * GB)))
    _print(removed)
    print(f"{len(removed)} removed, {cache.size() / GB:.2f} GB remain")


def _store(cache_dir: Path | None) -> Store:
    """Return the cache; raise `UserError` for a folder that was named and does not exist."""
    if cache_dir is not None and not cache_dir.expanduser().is_dir():
        what = "no such folder"
        raise UserError(what, where=f"--cache-dir {cache_dir}", do="correct the path, or leave the option out")
    return Store(cache_dir)


def _print(images: Sequence[CachedImage]) -> None:
    for image in images:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(image.used))
        print(f"{image.key[:12]}  {image.size / 10**6:9.1f} MB  {used}  {image.name or '-'} ({_KINDS[image.kind]})")
