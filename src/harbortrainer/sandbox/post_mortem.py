"""Who broke a sandbox: what is wrong inside it, and whether the infrastructure around it is sound.

An environment that can be examined has a method `post_mortem`, called after a trial failed and before its sandbox is
taken down. Contract: it never raises for what it finds. Invariant: the agent is blamed only when something inside its
sandbox shows what happened *and* every check of the infrastructure came out well; without either it is not.
"""

import asyncio
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

ASK = (
    "for d in /tests /logs/verifier; do mkdir -p $d && test ! -L $d && echo a > $d/.asked && rm $d/.asked || exit 3; "
    "done; echo $((6*7))"
)
"""What the shell of a sound sandbox answers with `ANSWER`: it can be graded in."""
ANSWER = "42\n"
ASK_S = 20.0
SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh", "/usr/bin/sh", "/bin/dash", "/usr/bin/dash")
_MOST = 1500
_LEAST_MEMORY_MB, _LEAST_DISK_MB = 256, 64


@dataclass
class PostMortem:
    """What was found."""

    signs: list[str] = field(default_factory=list)
    """What is wrong inside the sandbox."""
    sound: list[str] = field(default_factory=list)
    """The checks of the infrastructure that came out well."""
    unsound: list[str] = field(default_factory=list)
    """Those that did not."""

    @property
    def blames_the_agent(self) -> bool:
        """Whether the sandbox was broken from inside."""
        return bool(self.signs and self.sound) and not self.unsound

    def __str__(self) -> str:
        """For the record: at most 1500 characters."""
        parts = (("inside", self.signs), ("sound", self.sound), ("not sound", self.unsound))
        said = [f"{name}: {'; '.join(_short(found) for found in all_found)}" for name, all_found in parts if all_found]
        return ". ".join(said)[:_MOST]

    def check(self, well: bool, what: str) -> None:
        """Note a check of the infrastructure."""
        (self.sound if well else self.unsound).append(what)


@runtime_checkable
class Examinable(Protocol):
    """A sandbox that can be examined, and that makes room for grading."""

    async def make_room(self, *, kill: bool = False) -> None:
        """Grading begins in this sandbox.

        Args:
            kill: Whether what the agent left running is killed in any case; else only where it leaves no room.
        """
        ...

    async def room_is_over(self) -> None:
        """An agent works again."""
        ...

    async def post_mortem(self) -> PostMortem:
        """Examine it, and the infrastructure if something is wrong inside."""
        ...


@runtime_checkable
class Crowded(Protocol):
    """A sandbox in which nothing can be started any more once the agent has used up its limits."""

    async def used_up(self) -> str:
        """Which limit is all but reached, in words; "" for none."""
        ...


async def check_host(found: PostMortem, folder: Path) -> None:
    """Note whether this machine has memory, and room on the disk of `folder`."""
    memory, disk = await asyncio.to_thread(_memory_mb), await asyncio.to_thread(_disk_mb, folder)
    found.check(memory >= _LEAST_MEMORY_MB, f"the host has {memory} MB of memory left")
    found.check(disk >= _LEAST_DISK_MB, f"the host's disk has {disk} MB left")


def _memory_mb() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) // 1024


def _disk_mb(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free >> 20


def answered(code: int, out: str, err: str) -> str:
    """What is wrong with an answer to `ASK`; "" when nothing is."""
    if code == 0 and out == ANSWER:
        return ""
    return f"the shell ended with code {code} and said {(out + err).strip()[-200:]!r} instead of 42"


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
