"""The kernel's groups of sessions, as a test asks for them."""

import subprocess
from pathlib import Path


def may_go_first() -> bool:
    """Whether a session may take more than its share here; tried by one that ends at once."""
    write = ["sh", "-c", "echo -1 > /proc/self/autogroup"]
    return subprocess.run(write, capture_output=True, check=False, start_new_session=True).returncode == 0


def group_of(pid: int) -> str:
    """The group of a process's session as the kernel says it (`/autogroup-7 nice 0`); empty for one that has none."""
    return Path(f"/proc/{pid}/autogroup").read_text().strip()
