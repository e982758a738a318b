"""Leftovers of sandboxes on the machine, for the tests and for `kills.py`.

A sandbox consists of processes, control groups and, during a build, a folder. Its mounts and its network are in
namespaces that end with its processes.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_HELPER = re.compile(r"(?:inside import fork_server; fork_server\.main\(|^harbortrainer-sandbox )(\d+)\b")
_GROUPS = Path("/sys/fs/cgroup")
_GROUP = re.compile(r"harbortrainer-(\d+)$")


@dataclass
class Footprint:
    """Processes and mount namespaces of one process's sandboxes, recorded while that process lives."""

    processes: list[psutil.Process] = field(default_factory=list)
    namespaces: set[str] = field(default_factory=set)

    def remains(self) -> list[str]:
        """Describe what still exists."""
        alive = _describe(self.processes)
        mounts = sorted(self.namespaces & {space for pid in psutil.pids() if (space := _space(pid, "mnt"))})
        pids = {process.pid for process in self.processes}
        return [*alive, *(f"mount namespace {m}" for m in mounts), *_groups(lambda pid: pid in pids)]

    def wait_gone(self, seconds: float = 60.0) -> list[str]:
        """Wait at most `seconds` until nothing remains; describe what still exists."""
        end = time.monotonic() + seconds
        while (left := self.remains()) and time.monotonic() < end:
            time.sleep(0.05)
        return left


def ended(process: psutil.Process) -> bool:
    """Whether a process is gone or a zombie. It may end during the check."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def remaining_processes(processes: list[psutil.Process], within: float = 60.0) -> list[str]:
    """Wait at most `within` seconds for processes to end; describe those that have not."""
    _, alive = psutil.wait_procs(processes, timeout=within)
    return _describe(alive)


def footprint(owner: int) -> Footprint:
    """Return the fork server, monitors, init processes and commands of all current sandboxes of process `owner`."""
    found = Footprint()
    for process in psutil.Process(owner).children(recursive=True):
        if _owner(process) == owner:
            found.processes += [process, *process.children(recursive=True)]
    found.processes = list(dict.fromkeys(found.processes))
    ours = _space(os.getpid(), "mnt")
    found.namespaces = {space for p in found.processes if (space := _space(p.pid, "mnt")) and space != ours}
    return found


def orphans() -> list[str]:
    """Describe this machine's sandbox processes and control groups whose owner is gone; normally empty."""
    helpers = [p for p in psutil.process_iter() if (owner := _owner(p)) and not psutil.pid_exists(owner)]
    lost = [f"process {p.pid} of sandboxes of process {_owner(p)}, which is gone" for p in helpers if not ended(p)]
    return [*lost, *_groups(lambda pid: not psutil.pid_exists(pid))]


def unfinished(cache: Path) -> list[Path]:
    """Return the folders of unfinished builds. The next build of the same layer removes them."""
    return sorted(cache.glob("*/*/.*.part"))


def _groups(wanted: Callable[[int], bool]) -> list[str]:
    found = []
    for folder, folders, _ in os.walk(_GROUPS):
        found += [f"{folder}/{name}" for name in folders if (m := _GROUP.match(name)) and wanted(int(m[1]))]
    return [f"control group {path}" for path in found]


def _owner(process: psutil.Process) -> int | None:
    try:
        match = _HELPER.search(" ".join(process.cmdline()))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return int(match[1]) if match else None


def _describe(processes: list[psutil.Process]) -> list[str]:
    return [f"process {p.pid} ({_name(p)})" for p in processes if not ended(p)]


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "gone"


def _space(pid: int, kind: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")  # noqa: PTH115
    except OSError:
        return None
