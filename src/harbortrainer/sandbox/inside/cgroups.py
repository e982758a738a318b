"""Control groups, version 1 and 2: one group a sandbox and controller, where the machine lets us make one.

Invariant: what `create` made, `remove` takes away; a group whose monitor was killed is swept by the next helper.
"""

import contextlib
import errno
import os
import time
from typing import Any

_ROOT = "/sys/fs/cgroup"
_PREFIX = "harbortrainer-"
_FILES = {  # controller -> (file in version 1, file in version 2, what of the spec)
    "memory": ("memory.limit_in_bytes", "memory.max", "memory_bytes"),
    "pids": ("pids.max", "pids.max", "pids"),
    "cpu": ("cpu.cfs_quota_us", "cpu.max", "cpu_us"),
}
_PERIOD_US = 100_000


def create(spec: dict[str, Any]) -> list[str]:
    """Make the groups that hold the spec's limits. Returns their folders, none where the machine forbids them."""
    name = f"{_PREFIX}{os.getpid()}"
    made: list[str] = []
    parents = _parents()
    for parent in set(parents.values()):
        wanted = [c for c, folder in parents.items() if folder == parent and spec[_FILES[c][2]] is not None]
        if not wanted:
            continue
        path = f"{parent}/{name}"
        with contextlib.suppress(OSError):  # version 2: hand the controllers down, where they are not yet
            _write(f"{parent}/cgroup.subtree_control", " ".join(f"+{controller}" for controller in wanted))
        try:
            os.mkdir(path)
        except OSError:
            continue
        made.append(path)
        for controller in wanted:
            _limit(path, controller, spec)
    return made


def join(groups: list[str]) -> list[str]:
    """Move this process into the groups. Returns the controllers that really limit it."""
    limited = []
    for path in groups:
        try:
            _write(f"{path}/cgroup.procs", "0")
        except OSError:
            continue
        limited += [c for c, files in _FILES.items() if any(_is_set(f"{path}/{f}") for f in files[:2])]
    return limited


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


def _limit(path: str, controller: str, spec: dict[str, Any]) -> None:
    old, new, key = _FILES[controller]
    value = spec[key]
    with contextlib.suppress(OSError):
        if os.path.exists(f"{path}/{new}"):
            _write(f"{path}/{new}", f"{value} {_PERIOD_US}" if controller == "cpu" else str(value))
            if controller == "memory":
                _write(f"{path}/memory.swap.max", "0")
        else:
            _write(f"{path}/{old}", str(value))
            if controller == "memory":
                _write(f"{path}/memory.memsw.limit_in_bytes", str(value))


def _is_set(path: str) -> bool:
    try:
        with open(path) as file:
            text = file.read().strip()
    except OSError:
        return False
    return text not in ("max", "-1", "9223372036854771712") and not text.startswith("max ")


def _write(path: str, text: str) -> None:
    """Write to a file that the kernel has put there; in version 1 some are missing."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
