"""`harbortrainer images`: what the local sandbox keeps on the disk, and its bound."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from harbortrainer.sandbox.images.kept_images import GB, KeptImage, KeptImages
from harbortrainer.sandbox.layer_store import Store

_KINDS = {"image": "image", "layer": "layer on a root filesystem"}


def list_images(cache_dir: Path | None) -> None:
    """Print what is kept, the least recently used first."""
    store = Store(cache_dir)
    kept = KeptImages(store)
    found = kept.all()
    _print(found)
    print(f"{len(found)} kept, {kept.size() / GB:.2f} GB in {store.own}; what several share counts once")


def prune_images(cache_dir: Path | None, to_gb: float) -> None:
    """Remove the least recently used until no more than `to_gb` are kept; what a running sandbox uses stays."""
    kept = KeptImages(Store(cache_dir))
    gone = asyncio.run(kept.keep_within(int(to_gb * GB)))
    _print(gone)
    print(f"{len(gone)} removed, {kept.size() / GB:.2f} GB are left")


def _print(images: Sequence[KeptImage]) -> None:
    for image in images:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(image.used))
        print(f"{image.key[:12]}  {image.size / 10**6:9.1f} MB  {used}  {image.name or '-'} ({_KINDS[image.kind]})")
