"""Control groups, version 1 and 2: one group per sandbox and controller, where the machine permits it.

Invariant: `remove` deletes every group that `create` made. If a monitor was killed, the next fork server deletes its
groups.
"""

import contextlib
import errno
import os
import time

from harbortrainer.sandbox.inside.messages import SandboxSpec
from harbortrainer.sandbox.inside.syscalls import write

_ROOT = "/sys/fs/cgroup"
_PREFIX = "harbortrainer-"
_FILES = {  # controller -> (file in version 1, file in version 2)
    "memory": ("memory.limit_in_bytes", "memory.max"),
    "pids": ("pids.max", "pids.max"),
    "cpu": ("cpu.cfs_quota_us", "cpu.max"),
}
_PERIOD_US = 100_000


def create(spec: SandboxSpec) -> list[str]:
    """Create the groups with the limits of `spec`. Return their folders; empty if the machine forbids groups."""
    limits = {"memory": spec.memory_bytes, "pids": spec.pids, "cpu": spec.cpu_us}
    made: list[str] = []
    parents = _parent_folders()
    for parent in set(parents.values()):
        wanted = {c: limit for c, limit in limits.items() if limit is not None and parents.get(c) == parent}
        if not wanted:
            continue
        path = f"{parent}/{_PREFIX}{os.getpid()}"
        with contextlib.suppress(OSError):  # version 2: enable the controllers for child groups
            write(f"{parent}/cgroup.subtree_control", " ".join(f"+{controller}" for controller in wanted))
        try:
            os.mkdir(path)
        except OSError:
            continue
        made.append(path)
        for controller, limit in wanted.items():
            _set_limit(path, controller, limit)
    return made


def join(groups: list[str]) -> list[str]:
    """Move this process into the groups. Return the controllers that actually limit it."""
    limited = []
    for path in groups:
        try:
            write(f"{path}/cgroup.procs", "0")
        except OSError:
            continue
        limited += [c for c, files in _FILES.items() if any(_is_set(f"{path}/{f}") for f in files)]
    return limited


def raise_limits(groups: list[str], limits: dict[str, int]) -> None:
    """Set new limits for the controllers (`memory`, `pids`) that the groups already limit."""
    for path in groups:
        for controller, limit in limits.items():
            if any(_is_set(f"{path}/{file}") for file in _FILES[controller]):
                _set_limit(path, controller, limit)


def count_oom_kills(groups: list[str]) -> int:
    """Count the processes that the kernel killed because the groups reached their own memory limit."""
    killed = reached = 0
    for path in groups:
        for name, word in (("memory.oom_control", "oom_kill"), ("memory.events", "oom_kill")):
            killed += _read_count(f"{path}/{name}", word)
        reached += _read_count(f"{path}/memory.failcnt", "") + _read_count(f"{path}/memory.events", "oom")
    return killed if reached else 0


def remove(groups: list[str]) -> None:
    """Remove the groups. Retries for a second: the kernel may still hold the last process."""
    for path in groups:
        for _ in range(100):
            try:
                os.rmdir(path)
                break
            except OSError as error:
                if error.errno != errno.EBUSY:
                    break
                time.sleep(0.01)


def remove_stale() -> None:
    """Remove the groups of monitors that no longer run."""
    for parent in set(_parent_folders().values()):
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                pid = name.removeprefix(_PREFIX)
                if name.startswith(_PREFIX) and not os.path.exists(f"/proc/{pid}"):
                    with contextlib.suppress(OSError):
                        os.rmdir(f"{parent}/{name}")


def _parent_folders() -> dict[str, str]:
    """Return the parent folder for new groups by controller: next to the groups of this process."""
    parents: dict[str, str] = {}
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, names, path = line.rstrip("\n").split(":", 2)
            for controller in set(names.split(",")).intersection(_FILES):
                parents[controller] = _folder_or_root(f"{_ROOT}/{controller}", path)
            if not names and os.path.exists(f"{_ROOT}/cgroup.controllers"):
                for controller in set(_FILES) - set(parents):
                    parents[controller] = _folder_or_root(_ROOT, os.path.dirname(path))
    return parents


def _folder_or_root(root: str, path: str) -> str:
    full = root + path.rstrip("/")
    return full if os.path.isdir(full) else root


def _set_limit(path: str, controller: str, value: int) -> None:
    old, new = _FILES[controller]
    with contextlib.suppress(OSError):
        if os.path.exists(f"{path}/{new}"):
            write(f"{path}/{new}", f"{value} {_PERIOD_US}" if controller == "cpu" else str(value))
            if controller == "memory":
                write(f"{path}/memory.swap.max", "0")
        else:
            # The kernel refuses a memory+swap limit below the memory limit, so the write order depends on it.
            both = [f"{path}/{old}", *([f"{path}/memory.memsw.limit_in_bytes"] if controller == "memory" else [])]
            for file in both if not _is_set(both[-1]) else reversed(both):
                write(file, str(value))


def _read_count(path: str, word: str) -> int:
    """Return the number after `word` in a file of `word number` lines; "" reads a file with just one number."""
    try:
        with open(path) as file:
            rows = [line.split() for line in file]
    except OSError:
        return 0
    return sum(int(row[-1]) for row in rows if row and row[-1].isdigit() and [*row[:-1]] == ([word] if word else []))


def _is_set(path: str) -> bool:
    try:
        with open(path) as file:
            text = file.read().strip()
    except OSError:
        return False
    return text not in ("max", "-1", "9223372036854771712") and not text.startswith("max ")
