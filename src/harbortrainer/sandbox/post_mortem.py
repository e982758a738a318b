"""Post-mortem of a failed trial's sandbox: did the agent break it, or did the infrastructure fail?

Environments implement `post_mortem`. It is called after a trial failed and before its sandbox stops, and never raises
for what it finds. Invariant: the agent is blamed only if there is a sign inside its sandbox and every check of the
infrastructure passed.
"""

import asyncio
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from harbortrainer.errors import clauses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harbor.environments.base import EnvironmentPath, ExecResult

PROBE = (
    "for d in /tests /logs/verifier; do mkdir -p $d && test ! -L $d && echo a > $d/.asked && rm $d/.asked || exit 3; "
    "done; echo $((6*7))"
)
"""A command that prints `PROBE_OUTPUT` in a sandbox that can be graded in."""
PROBE_OUTPUT = "42\n"
PROBE_TIMEOUT_S = 20.0
SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh", "/usr/bin/sh", "/bin/dash", "/usr/bin/dash")
_MAX_CHARS = 1500
_MIN_MEMORY_MB, _MIN_DISK_MB = 256, 64


@dataclass
class PostMortem:
    """The findings of a post-mortem."""

    signs: list[str] = field(default_factory=list)
    """Signs that the sandbox was broken from inside."""
    sound: list[str] = field(default_factory=list)
    """Infrastructure checks that passed."""
    unsound: list[str] = field(default_factory=list)
    """Infrastructure checks that failed."""

    @property
    def agent_at_fault(self) -> bool:
        """Whether the sandbox was broken from inside."""
        return bool(self.signs and self.sound) and not self.unsound

    def __str__(self) -> str:
        """Format for the trial's record, cut to 1500 characters."""
        parts = (("inside", self.signs), ("sound", self.sound), ("not sound", self.unsound))
        lines = [f"{name}: {clauses(*map(_short, all_found))}" for name, all_found in parts if all_found]
        return ". ".join(lines)[:_MAX_CHARS]

    def check(self, passed: bool, what: str) -> None:
        """Record an infrastructure check."""
        (self.sound if passed else self.unsound).append(what)


@runtime_checkable
class Examinable(Protocol):
    """A sandbox with a post-mortem, and with separate limits for grading."""

    async def raise_limits(self, *, kill: bool = False) -> None:
        """Prepare the sandbox for grading.

        Args:
            kill: Kill the agent's leftover processes in any case, not only if they exhaust a limit.
        """
        ...

    async def restore_limits(self) -> None:
        """Restore the agent's limits after grading."""
        ...

    async def post_mortem(self) -> PostMortem:
        """Examine the sandbox, and the infrastructure if something is wrong inside."""
        ...


@runtime_checkable
class ReportsExhaustedLimits(Protocol):
    """A sandbox that starts no more processes once the agent has exhausted its limits."""

    async def exhausted_limit(self) -> str:
        """Describe the limit that is nearly reached; "" for none."""
        ...


@runtime_checkable
class ClearsFolders(Protocol):
    """A sandbox that can empty folders without starting a process inside."""

    async def clear_folders(
        self, writable: "Sequence[EnvironmentPath]", others: "Sequence[EnvironmentPath]"
    ) -> "ExecResult":
        """Empty folders; make `writable` world-writable. Returns the first failure, if any."""
        ...


async def check_host(found: PostMortem, folder: Path) -> None:
    """Record whether this machine has free memory, and free space on the disk of `folder`."""
    memory, disk = await asyncio.to_thread(_memory_mb), await asyncio.to_thread(_disk_mb, folder)
    found.check(memory >= _MIN_MEMORY_MB, f"the host has {memory} MB of memory left")
    found.check(disk >= _MIN_DISK_MB, f"the host's disk has {disk} MB left")


def _memory_mb() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) // 1024


def _disk_mb(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free >> 20


def probe_problem(code: int, out: str, err: str) -> str:
    """Describe what is wrong with the result of `PROBE`; "" if it passed."""
    if code == 0 and out == PROBE_OUTPUT:
        return ""
    return f"the shell ended with code {code} and printed {(out + err).strip()[-200:]!r} instead of 42"


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
