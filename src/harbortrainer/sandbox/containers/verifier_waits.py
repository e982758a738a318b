"""What a verifier in a container suffers from, read by root on the daemon's machine.

These are pipes and leased files that it waits for, and folders of the harness that were moved away.

The daemon starts each command of the harness as a child of the container's shim, outside the container's process
namespace. No process inside can start one there, so the commands since the start of grading are the verifier's.
"""

import os
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass

from harbortrainer.sandbox.inside.file_waits import Period, children, descendants, describe_waits, process_namespace
from harbortrainer.sandbox.inside.processes import read

_TICKS = os.sysconf("SC_CLK_TCK")
_PARENT, _START = 1, 19


@dataclass
class PhaseClock:
    """Times at which the agent and the verifier began."""

    agent_ns: int = 0
    """Start of the agent, in nanoseconds of the files' clock."""
    grading_ns: int = 0
    """Start of grading; 0 before it."""
    grading_ticks: float = 0.0
    """The same in clock ticks since boot, as processes are dated."""

    def start_agent(self) -> None:
        """Record the start of the agent."""
        self.agent_ns, self.grading_ns = time.time_ns(), 0

    def start_grading(self) -> None:
        """Record the start of grading, unless it is recorded."""
        if not self.grading_ns:
            self.grading_ns = time.time_ns()
            self.grading_ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS

    def describe_waits(self, pid: int) -> list[str]:
        """Describe the waits of the verifier in the container of a process; none before grading or if unreadable."""
        if not self.grading_ns:
            return []
        return describe_waits(self._verifier_pids(pid), Period(self.agent_ns, self.grading_ns))

    def is_leftover(self, process: int, pid: int) -> bool:
        """Whether the agent left a process running in the container of process `pid`; false before grading."""
        if not self.grading_ns or process_namespace(process) != process_namespace(pid):
            return False
        shim = _stat_field(pid, _PARENT)
        while process > 1 and (parent := _stat_field(process, _PARENT)) != shim:
            process = parent
        return process <= 1 or _stat_field(process, _START) < self.grading_ticks - 1

    def _verifier_pids(self, pid: int) -> Iterator[int]:
        shim, namespace = _stat_field(pid, _PARENT), process_namespace(pid)
        for child in children(shim):
            if _stat_field(child, _START) >= self.grading_ticks - 1 and process_namespace(child) == namespace:
                yield child
                yield from descendants(child)


def mount_points(pid: int) -> set[str]:
    """Return the paths at which something is mounted for a process; none if that cannot be read."""
    return {path for path, _ in mounts(pid).values()}


def moved_mounts(pid: int, before: Set[str]) -> list[str]:
    """Describe mounted folders that were moved: a verifier's reward would not reach this machine."""
    if not (now := mount_points(pid)):
        return []  # the container has ended
    return [f"{path} was moved to another place" for path in sorted(before - now)]


def mounts(pid: int) -> dict[str, tuple[str, list[str]]]:
    """Return path and options of each mount that a process sees, by the mount's id."""
    lines = [line.split(" ") for line in read(f"/proc/{pid}/mountinfo").splitlines()]
    return {fields[0]: (fields[4], fields[5].split(",")) for fields in lines if len(fields) > 5}


def _stat_field(pid: int, place: int) -> int:
    """Return a field of /proc/PID/stat, counted from the state; 0 if the process has ended."""
    fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[place]) if fields else 0
