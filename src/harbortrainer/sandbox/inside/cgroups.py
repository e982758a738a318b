"""Control groups, version 1 and 2: one group a sandbox and controller, where the machine lets us make one.

Invariant: what `create` made, `remove` takes away; a group whose monitor was killed is swept by the next helper.
"""

import contextlib
import errno
import os
import time

from harbortrainer.sandbox.inside.kernel import write
from harbortrainer.sandbox.inside.messages import SandboxSpec

_ROOT = "/sys/fs/cgroup"
_PREFIX = "harbortrainer-"
_FILES = {  # controller -> (file in version 1, file in version 2)
    "memory": ("memory.limit_in_bytes", "memory.max"),
    "pids": ("pids.max", "pids.max"),
    "cpu": ("cpu.cfs_quota_us", "cpu.max"),
}
_PERIOD_US = 100_000


def create(spec: SandboxSpec) -> list[str]:
    """Make the groups that hold the spec's limits. Returns their folders, none where the machine forbids them."""
    limits = {"memory": spec.memory_bytes, "pids": spec.pids, "cpu": spec.cpu_us}
    made: list[str] = []
    parents = _parents()
    for parent in set(parents.values()):
        wanted = {c: limit for c, limit in limits.items() if limit is not None and parents.get(c) == parent}
        if not wanted:
            continue
        path = f"{parent}/{_PREFIX}{os.getpid()}"
        with contextlib.suppress(OSError):  # version 2: hand the controllers down, where they are not yet
            write(f"{parent}/cgroup.subtree_control", " ".join(f"+{controller}" for controller in wanted))
        try:
            os.mkdir(path)
        except OSError:
            continue
        made.append(path)
        for controller, limit in wanted.items():
            _limit(path, controller, limit)
    return made


def join(groups: list[str]) -> list[str]:
    """Move this process into the groups. Returns the controllers that really limit it."""
    limited = []
    for path in groups:
        try:
            write(f"{path}/cgroup.procs", "0")
        except OSError:
            continue
        limited += [c for c, files in _FILES.items() if any(_is_set(f"{path}/{f}") for f in files)]
    return limited


def widen(groups: list[str], limits: dict[str, int]) -> None:
    """Set other limits of memory and processes, where the groups limit them at all."""
    for path in groups:
        for controller, limit in limits.items():
            if any(_is_set(f"{path}/{file}") for file in _FILES[controller]):
                _limit(path, controller, limit)


def ended_for_memory(groups: list[str]) -> int:
    """How many processes the kernel has ended since the groups' own limit of memory was reached."""
    killed = reached = 0
    for path in groups:
        for name, word in (("memory.oom_control", "oom_kill"), ("memory.events", "oom_kill")):
            killed += _counted(f"{path}/{name}", word)
        reached += _counted(f"{path}/memory.failcnt", "") + _counted(f"{path}/memory.events", "oom")
    return killed if reached else 0


def remove(groups: list[str]) -> None:
    """Remove the groups; the kernel may take a moment to let go of the last process."""
    for path in groups:
        for _ in range(100):
            try:
                os.rmdir(path)
                break
            except OSError as error:
                if error.errno != errno.EBUSY:
                    break
                time.sleep(0.01)


def sweep() -> None:
    """Remove groups whose monitor is gone."""
    for parent in set(_parents().values()):
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                pid = name.removeprefix(_PREFIX)
                if name.startswith(_PREFIX) and not os.path.exists(f"/proc/{pid}"):
                    with contextlib.suppress(OSError):
                        os.rmdir(f"{parent}/{name}")


def _parents() -> dict[str, str]:
    """Where each controller's groups can be made: beside the groups of this process."""
    parents: dict[str, str] = {}
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, names, path = line.rstrip("\n").split(":", 2)
            for controller in set(names.split(",")).intersection(_FILES):
                parents[controller] = _existing(f"{_ROOT}/{controller}", path)
            if not names and os.path.exists(f"{_ROOT}/cgroup.controllers"):
                for controller in set(_FILES) - set(parents):
                    parents[controller] = _existing(_ROOT, os.path.dirname(path))
    return parents


def _existing(root: str, path: str) -> str:
    full = root + path.rstrip("/")
    return full if os.path.isdir(full) else root


def _limit(path: str, controller: str, value: int) -> None:
    old, new = _FILES[controller]
    with contextlib.suppress(OSError):
        if os.path.exists(f"{path}/{new}"):
            write(f"{path}/{new}", f"{value} {_PERIOD_US}" if controller == "cpu" else str(value))
            if controller == "memory":
                write(f"{path}/memory.swap.max", "0")
        else:
            # Of memory and of memory with swap, the second is never to be below the first.
            both = [f"{path}/{old}", *([f"{path}/memory.memsw.limit_in_bytes"] if controller == "memory" else [])]
            for file in both if not _is_set(both[-1]) else reversed(both):
                write(file, str(value))


def _counted(path: str, word: str) -> int:
    """The number after a word in a file of lines; of a file that is one number with the word ""."""
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
