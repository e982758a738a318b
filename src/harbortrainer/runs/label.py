"""Labels on the processes and sandboxes of a run, by which they are found after the run was killed.

- The *run's label* is in an environment variable of its processes, and in a label of its sandboxes.
- The *owner* is the process without which a sandbox is of no use: the environment server, `rl`'s launcher, or the
  trial's own.

Invariant: no two runs have the same label, on one machine or on several. An owner counts as ended only if this process
can see that: same user, same machine since its last boot, same process namespace.
"""

import hashlib
import os
import uuid
from pathlib import Path
from typing import Literal

import psutil

from harbortrainer.runs.durable import write_whole

RUN_VARIABLE = "HARBORTRAINER_RUN"
RUN_LABEL = "harbortrainer.run"
OWNER_VARIABLE = "HARBORTRAINER_OWNER"
OWNER_LABEL = "harbortrainer.owner"
NO_RUN = "none"
"""The run's label of sandboxes that belong to no run."""
TRIALS_DIR_VARIABLE = "HARBORTRAINER_TRIALS_DIR"
"""Environment variable with the folder of the run's trials."""
LABEL_FILE = ".label"
"""File in the run's folder with the random part of its label."""

type OwnerState = Literal["running", "ended", "unknown", "of another user"]


def run_label(folder: Path, file: str = LABEL_FILE) -> str:
    """Return the label of the run in a folder: its name and a hash.

    The hash is of the folder's absolute path and of a random number, which the first call writes into the folder. So
    neither a copy of the folder nor the same path on another machine has this label.

    Args:
        folder: The run's folder.
        file: Path of the label file in it; its parent must exist.
    """
    path = folder.absolute()
    if not (path / file).is_file():
        write_whole(path / file, f"{uuid.uuid4().hex}\n")
    number = (path / file).read_text(encoding="utf-8").strip()
    return f"{path.name}-{hashlib.sha256(f'{number} {path}'.encode()).hexdigest()[:8]}"


def this_owner() -> str:
    """Return the owner of sandboxes that this process starts: the one in the environment, else this process."""
    return os.environ.get(OWNER_VARIABLE) or owner_of_process(os.getpid())


def run_labels(separator: str = ".") -> dict[str, str]:
    """Return the labels of a sandbox that this process starts now, with `harbortrainer` as the prefix of their names.

    Args:
        separator: What follows the prefix; some providers allow no dot.
    """
    return {
        f"harbortrainer{separator}run": os.environ.get(RUN_VARIABLE, NO_RUN),
        f"harbortrainer{separator}owner": this_owner(),
    }


def owner_of_process(pid: int) -> str:
    """Return a running process as an owner: `USER.PID.START.MACHINE`. Raises `psutil.NoSuchProcess`."""
    return f"{os.getuid()}.{pid}.{_start_of(pid)}.{_machine()}"


def owner_state(owner: str) -> OwnerState:
    """Return whether an owner still runs; `unknown` for another machine, and for what is not an owner."""
    user, _, rest = owner.partition(".")
    pid, _, rest = rest.partition(".")
    start, _, machine = rest.partition(".")
    if not pid.isdigit() or machine != _machine():
        return "unknown"
    if user != str(os.getuid()):
        return "of another user"
    try:
        return "running" if _start_of(int(pid)) == start else "ended"
    except psutil.NoSuchProcess:
        return "ended"


def _start_of(pid: int) -> str:
    """Return when a process started. On Linux in clock ticks since the boot, which no change of the clock moves."""
    stat = Path(f"/proc/{pid}/stat")
    process = psutil.Process(pid)
    if process.status() == psutil.STATUS_ZOMBIE:
        raise psutil.NoSuchProcess(pid)
    if not stat.exists():
        return str(round(process.create_time()))
    return stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]


def _machine() -> str:
    """Return a name for what gives process ids their meaning: the machine, its boot, and the process namespace."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [os.uname().nodename]
    if boot.exists():
        parts += [boot.read_text(encoding="utf-8").strip(), str(namespace.readlink())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
