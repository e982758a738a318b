"""Meters of the benchmarks: CPU seconds of a process tree, stalls of the event loop, memory."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

_CPUACCT = Path("/sys/fs/cgroup/cpuacct")
_TICK_S = 0.001


class CpuClock:
    """CPU seconds of this process and of all processes that it starts, including sandboxes and their cleanup.

    Uses its own control group if possible (cgroup v1's cpuacct), else the CPU time of the whole machine. The latter is
    exact on an idle machine only. Create the clock before any process is started.

    Args:
        group: An existing group, `cpuacct/NAME`, with a Docker daemon that only the benchmark uses.
        machine: Count the whole machine, because a shared Docker daemon works for the benchmark too.
    """

    def __init__(self, group: Path | None = None, *, machine: bool = False) -> None:
        self._own = group is None
        self._group = Path() if machine else group or _CPUACCT / f"harbortrainer-bench-{os.getpid()}"
        if not self.exact:
            return
        try:
            self._group.mkdir(exist_ok=True)
            (self._group / "cgroup.procs").write_text("0")
        except OSError:
            self._group = Path()

    @property
    def exact(self) -> bool:
        """Whether other processes of the machine are excluded."""
        return self._group != Path()

    def read(self, other: psutil.Process) -> float:
        """Return the CPU seconds so far, without the process `other`."""
        if self.exact:
            used = int((self._group / "cpuacct.usage").read_text()) / 1e9
        else:
            times = psutil.cpu_times()
            used = sum(times) - times.idle - times.iowait
        return used - sum(other.cpu_times()[:2])

    def processes(self) -> list[psutil.Process]:
        """Return the counted processes: the group's, or this process and its descendants."""
        if not self.exact:
            return [psutil.Process(), *psutil.Process().children(recursive=True)]
        found = []
        for listed in self._group.rglob("cgroup.procs"):
            with contextlib.suppress(OSError, psutil.Error):
                found += [psutil.Process(int(pid)) for pid in listed.read_text().split()]
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.exact and self._own:
            with contextlib.suppress(OSError):
                for pid in (self._group / "cgroup.procs").read_text().split():
                    (_CPUACCT / "cgroup.procs").write_text(pid)
                self._group.rmdir()


@dataclass
class Stall:
    """The longest time for which the event loop was blocked."""

    longest_s: float = 0.0
    _next: asyncio.TimerHandle | None = None

    def watch(self, tick_s: float) -> None:
        """Measure the running event loop every `tick_s` seconds, until it ends or `stop` is called."""
        loop = asyncio.get_running_loop()

        def tick(due: float) -> None:
            now = loop.time()
            self.longest_s = max(self.longest_s, now - due)
            self._next = loop.call_at(now + tick_s, tick, now + tick_s)

        tick(loop.time())

    def stop(self) -> None:
        """End the measurement."""
        if self._next is not None:
            self._next.cancel()


@asynccontextmanager
async def watched_loop() -> AsyncGenerator[Stall]:
    """Measure the event loop's longest stall while the block runs."""
    stall = Stall()
    stall.watch(_TICK_S)
    try:
        yield stall
    finally:
        stall.stop()


def tree_memory(processes: list[psutil.Process] | None = None) -> float:
    """Return the megabytes (PSS) of the given processes, by default of this process and its descendants."""
    total = 0
    for process in processes or [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 1e6
