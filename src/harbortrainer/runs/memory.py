"""Memory of a process: peak use of its process tree, malloc's heap, garbage collection."""

import ctypes
import gc
import platform
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Self

import psutil

INTERVAL_S = 1.0
M_ARENA_MAX = -8
ARENAS = 2
_YOUNG_OBJECTS = 2_000_000


def limit_malloc_arenas() -> None:
    """Limit glibc to two malloc arenas instead of one per thread; does nothing without glibc.

    Tensors allocated in one thread and freed in another fragment the arenas. A long run grew by 100 MB a step with one
    arena per thread, and not at all with two.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def release_freed_memory() -> None:
    """Return the freed memory of malloc's heap to the machine; does nothing without glibc.

    glibc keeps freed tensors of up to 32 MB in its heap. After a training step of a small model these were 3.6 GiB.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def freeze_gc() -> None:
    """Exclude all current objects from garbage collection.

    Imported libraries hold half a million permanent objects. Each scan of them stalls the event loop for a third of a
    second.
    """
    gc.collect()
    gc.freeze()


def collect_garbage_rarely() -> None:
    """Start a garbage collection after two million new objects instead of Python's 700.

    Each collection scans the token lists of all trials in flight, and finds nothing: reference counts free an ended
    trial (`EndedObjects` has the exception). With 500 trials in flight it stalled a worker for up to 0.4 s, and took a
    tenth of its CPU.
    """
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


class EndedObjects:
    """Counts ended objects that are still in memory, and collects garbage when there are too many.

    A user's agent, for example, may keep itself in a reference cycle.

    Args:
        most: Ended objects that may remain in memory.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._ended: list[weakref.ref[object]] = []

    def add(self, ended: object) -> None:
        """Count an object that its caller no longer needs."""
        self._ended = [each for each in self._ended if each() is not None]
        if len(self._ended) >= self._most:
            gc.collect()
            self._ended = []
        self._ended.append(weakref.ref(ended))


@contextmanager
def frozen_gc() -> Generator[None]:
    """Exclude all current objects from garbage collection during a block.

    It must end, since extensions such as triton's report objects as leaks that are never collected.
    """
    freeze_gc()
    try:
        yield
    finally:
        gc.unfreeze()


def tree_rss_mb(process: psutil.Process) -> float:
    """Return the resident memory of a process and its descendants in MB (10^6); shared pages count in each."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 1e6


class PeakMemory:
    """Monitor of this process tree's memory while the context is open; `peak_mb` is the maximum."""

    def __init__(self, peak_mb: float = 0.0) -> None:
        self.peak_mb = peak_mb
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join(timeout=5)

    def sample(self) -> None:
        """Update the maximum with the current memory."""
        self.peak_mb = max(self.peak_mb, tree_rss_mb(psutil.Process()))

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self.sample()
