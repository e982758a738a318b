"""Helpers for the kernel's autogroups of sessions."""

import subprocess
from pathlib import Path


def can_raise_priority() -> bool:
    """Try in a short session whether it may raise its own scheduling priority."""
    write = ["sh", "-c", "echo -1 > /proc/self/autogroup"]
    return subprocess.run(write, capture_output=True, check=False, start_new_session=True).returncode == 0


def group_of(pid: int) -> str:
    """Return a process's autogroup as the kernel prints it (`/autogroup-7 nice 0`); empty without one."""
    return Path(f"/proc/{pid}/autogroup").read_text().strip()
