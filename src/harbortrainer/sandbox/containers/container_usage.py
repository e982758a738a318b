"""What lives in a container and what may: processes and memory.

The kernel's own files tell it at once, where the daemon is on this machine. The daemon tells it too, a second later.
Nothing runs inside, so that nothing inside can lie.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_CACHES = ("inactive_file", "active_file")
_MEMORY = {"usage_in_bytes": "limit_in_bytes", "current": "max"}
"""What control groups of version 1 and 2 call it, and its limit."""


@dataclass(frozen=True)
class ContainerUsage:
    """Counts, and bytes without what the kernel can drop; a limit of 0 is none."""

    processes: int
    most_processes: int
    memory: int
    most_memory: int

    @property
    def shortage(self) -> str:
        """Which limit is all but reached (3/4 of the processes, 7/8 of the memory), in words; "" for none."""
        if self.processes > self.most_processes * 3 // 4 > 0:
            return f"{self.processes} of {self.most_processes} processes ran"
        if self.memory > self.most_memory * 7 // 8 > 0:
            return f"memory was at {self.memory >> 20} of {self.most_memory >> 20} MB"
        return ""

    @classmethod
    def of_daemon(cls, said: Mapping[str, Mapping]) -> "ContainerUsage":
        """What the daemon's `stats` say."""
        processes, memory = said.get("pids_stats", {}), said.get("memory_stats", {})
        used = memory.get("usage", 0) - _caches(memory.get("stats", {}))
        return cls(processes.get("current", 0), processes.get("limit", 0), used, memory.get("limit", 0))

    @classmethod
    def of_kernel(cls, pid: int, container: str, root: Path = Path("/")) -> "ContainerUsage | None":
        """What the control groups of a container say; None where they are not this machine's to read.

        Args:
            pid: The container's first process, as its daemon knows it: here it may be another, or none.
            container: The id, which its groups have in their names.
            root: Where `proc` and `sys` are.
        """
        try:
            groups = dict(_groups(root / f"proc/{pid}/cgroup", container))
            processes, memory = (_folder(root, groups, name) for name in ("pids", "memory"))
            (used, most), *_ = ((u, m) for u, m in _MEMORY.items() if (memory / f"memory.{u}").exists())
            details = dict(line.split() for line in (memory / "memory.stat").read_text().splitlines())
            return cls(
                _number(processes / "pids.current"),
                _number(processes / "pids.max"),
                _number(memory / f"memory.{used}") - _caches({name: int(text) for name, text in details.items()}),
                _number(memory / f"memory.{most}"),
            )
        except (OSError, KeyError, ValueError):
            return None


def _groups(file: Path, container: str) -> Iterator[tuple[str, str]]:
    """The container's own group in each hierarchy, by its controller; "" is that of version 2."""
    for line in file.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        before, found, after = path.partition(container)
        if found:  # its processes can be in a group below
            for name in controllers.split(","):
                yield name, before + found + after.partition("/")[0]


def _folder(root: Path, groups: Mapping[str, str], controller: str) -> Path:
    own = f"{controller}{groups[controller]}" if controller in groups else groups[""].lstrip("/")
    return root / "sys/fs/cgroup" / own


def _number(file: Path) -> int:
    text = file.read_text().strip()
    return 0 if text == "max" else int(text)


def _caches(details: Mapping[str, int]) -> int:
    return sum(details.get(f"total_{name}", details.get(name, 0)) for name in _CACHES)
