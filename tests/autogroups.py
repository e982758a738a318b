"""The kernel's groups of sessions, as a test asks for them."""

import subprocess
from pathlib import Path


def may_go_first() -> bool:
    """Whether a session may take more than its share here; tried by one that ends at once."""
    write = ["sh", "-c", "echo -1 > /proc/self/autogroup"]
    return subprocess.run(write, capture_output=True, check=False, start_new_session=True).returncode == 0


def nice_of(pid: int) -> int:
    """The nice value of a process's session."""
    return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
