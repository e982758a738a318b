"""The memory of a process: the largest of it and all that it started, its heap, its garbage collector."""

import ctypes
import gc
import platform
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Self

import psutil

INTERVAL_S = 1.0
M_ARENA_MAX = -8
ARENAS = 2


def steady_heap() -> None:
    """Keep glibc from giving each thread a heap of its own.

    Tensors that one thread makes and another frees leave those heaps full of holes: a run of many steps grew by
    100 MB a step, and by nothing with two heaps. Elsewhere than on glibc this does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def leave_imports_alone() -> None:
    """Take what is imported and loaded by now out of the garbage collector's rounds.

    Harbor and LiteLLM, or torch and transformers, leave half a million objects behind that live as long as the process:
    going through them stalls the event loop for a third of a second each time.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def imports_left_alone() -> Generator[None]:
    """The same for the length of a block. Extensions that count at the process's end what was never collected, such as
    triton's, tell of leaks where it goes on for ever."""
    leave_imports_alone()
    try:
        yield
    finally:
        gc.unfreeze()


def tree_rss_mb(process: psutil.Process) -> float:
    """Resident memory of a process and all its descendants now, in MB (10^6). Shared pages count in each."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 1e6


class PeakMemory:
    """Watches this process's tree while it is open; `peak_mb` is what it saw at most."""

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

    def look(self) -> None:
        """Take one sample."""
        self.peak_mb = max(self.peak_mb, tree_rss_mb(psutil.Process()))

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self.look()
