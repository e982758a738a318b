"""Check for leaks over thousands of concurrent trials, in sandboxes with an image.

    python benchmarks/soak.py                     2000 trials, 16 concurrently; some minutes
    python benchmarks/soak.py --trials 300 --image host

After every tenth of the trials, while none runs, it counts:

- memory, open files, threads and processes of this process and its descendants
- mounts of the machine
- bytes in the image store
- processes and control groups without an owner

The exit code is 1 if the last count exceeds the count after the first tenth. Memory may grow by 5 %, since allocators
keep freed memory. Use several hundred trials or more, because thread pools fill up first.
"""

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import psutil
from leftovers import orphans
from meters import tree_memory
from rich.console import Console
from rich.table import Table
from scripted_model import model_server
from trial_arms import ARMS, Setting
from trials import write_task

from harbortrainer.runs.memory import freeze_gc
from harbortrainer.sandbox.images.image_cache import ImageCache
from harbortrainer.sandbox.layer_store import Store

_TENTHS = 10
_KEPT = 1.05
_QUIET_S = 2.0


@dataclass(frozen=True)
class Count:
    """Resources in use while no trial runs."""

    memory_mb: float
    files: int
    threads: int
    processes: int
    mounts: int
    store_mb: float
    orphans: int

    def above(self, first: "Count") -> list[str]:
        """Describe each resource that has grown since `first`."""
        before, now = asdict(first), asdict(self)
        bound = {name: value * (_KEPT if name == "memory_mb" else 1) for name, value in before.items()}
        return [f"{name}: {now[name]:g}, was {before[name]:g}" for name in now if now[name] > bound[name]]


def count(store: ImageCache) -> Count:
    """Count the resources in use."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return Count(
        memory_mb=round(tree_memory(family), 1),
        files=sum(process.num_fds() for process in family),
        threads=sum(process.num_threads() for process in family),
        processes=len(family),
        mounts=len(Path("/proc/mounts").read_text().splitlines()),
        store_mb=round(store.size() / 1e6, 1),
        orphans=len(orphans()),
    )


async def _lane(setting: Setting, left: Iterator[int]) -> None:
    for _ in left:
        await ARMS["ours"](setting)


async def soak(setting: Setting, trials: int, at_once: int, console: Console) -> list[Count]:
    """Run the trials; return the count after every tenth of them."""
    store, counts = ImageCache(Store()), []
    await ARMS["ours"](setting)  # imports, the image and connections
    freeze_gc()
    for tenth in range(_TENTHS):
        left, began = iter(range(trials // _TENTHS)), time.perf_counter()

        await asyncio.gather(*(_lane(setting, left) for _ in range(at_once)))
        took = time.perf_counter() - began
        await asyncio.sleep(_QUIET_S)
        counts.append(await asyncio.to_thread(count, store))
        console.print(f"{(tenth + 1) * (trials // _TENTHS)} trials, {60 * (trials // _TENTHS) / took:.0f} a minute")
    return counts


def main() -> int:
    """Run the trials, print the counts, and return whether anything grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--at", type=int, default=16, help="concurrent trials")
    parser.add_argument("--image", choices=["build", "host"], default="build", help="root of the sandboxes")
    args, console = parser.parse_args(), Console()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="bench-soak-") as folder, model_server(3, 0.02) as (url, _):
        setting = Setting(write_task(Path(folder) / "write-answer"), url, "local", args.image)
        counts = asyncio.run(soak(setting, args.trials, args.at, console))
    shown = counts[::3]
    table = Table("after", *(f"{1 + 3 * number}/{_TENTHS}" for number in range(len(shown))))
    for name in asdict(counts[0]):
        table.add_row(name, *(f"{asdict(seen)[name]:g}" for seen in shown))
    console.print(table)
    grown = counts[-1].above(counts[0])
    console.print("\n".join(grown) or "nothing grew")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
