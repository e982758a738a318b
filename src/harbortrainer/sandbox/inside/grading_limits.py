"""Extra disk, memory and processes for grading, which the agent cannot use up.

When grading begins, the monitor outside the sandbox raises the limits. Processes that the agent left running continue,
since the task may grade them. They are killed if the agent had exhausted a limit, or if they use up the extra limits
while the verifier runs. Every such action sends a note, so that a failed grading can be attributed to the agent.

Invariant: a process that a grading command started is never killed, unless it left its command's session.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

from harbortrainer.sandbox.inside import processes
from harbortrainer.sandbox.inside.messages import SandboxSpec

INTERVAL_MS = 100
RAISE_LIMITS, MARK_START, REPORT_CHANGES, REPORT_WAITS, SHOW_AGENT_FILES = b"r", b"s", b"c", b"w", b"f"
"""Requests to the monitor."""
DONE, REFUSED = b"k", b"n"
"""Answers of the monitor."""
EXTRA_DISK_MB, EXTRA_FILES, EXTRA_PROCESSES, EXTRA_MEMORY_MB = 64, 16384, 64, 64
_MAX_INCREASES = 8
_REQUEST_S = 20.0
_KILL_S = 5.0
_REQUEST_ERRORS = {
    RAISE_LIMITS: "could not raise the limits for grading",
    MARK_START: "could not mark the start of the agent's changes",
    REPORT_CHANGES: "could not read the agent's changes",
    REPORT_WAITS: "could not read what the verifier waited for",
    SHOW_AGENT_FILES: "could not show the verifier the agent's files",
}


class GradingLimits:
    """Reserves the extra limits for grading.

    Args:
        monitor: The socket to the monitor, which raises the limits by the `EXTRA_` constants.
        note: Sends a note on what was done.
        reap: Reaps the processes that have ended.
        kill_agent: Kills all processes of the agent at once.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        monitor: socket.socket,
        *,
        note: Callable[[str], None],
        reap: Callable[[], object],
        kill_agent: Callable[[], None],
    ) -> None:
        self._spec, self._monitor, self._note, self._reap, self._kill_agent = spec, monitor, note, reap, kill_agent
        self._monitor.settimeout(_REQUEST_S)
        self._increases = 0
        self.grading = False
        self.grading_sessions: set[int] = set()
        """Session ids of the commands that were started since grading began."""

    @property
    def memory_bytes(self) -> int:
        """The present memory limit."""
        return self._spec.memory_bytes + self._increases * ((EXTRA_MEMORY_MB + EXTRA_DISK_MB) << 20)

    def begin(self, *, kill: bool) -> None:
        """Begin grading: kill leftover processes if necessary, and raise the limits.

        Args:
            kill: Kill the agent's processes even if no limit was exhausted.
        """
        self.grading = True
        self.grading_sessions.clear()
        reason = "on request" if kill else self._exhausted_limit()
        if reason:
            self.kill_leftovers(reason)
        self._raise_limits()

    def end(self) -> None:
        """End grading: an agent runs again."""
        self.grading = False
        self.grading_sessions.clear()

    def watch(self) -> None:
        """Kill leftover processes that use up the extra limits. Called every `INTERVAL_MS` while grading."""
        reason = self._exhausted_reserve()
        if reason and self._leftover_pids():
            self.kill_leftovers(reason)
            self._raise_limits()

    def enforce_process_limit(self, running: int) -> None:
        """Kill leftover processes if more than the limit run. Called often where no control group limits them."""
        limit = self._spec.pids + self._increases * EXTRA_PROCESSES
        if running > limit:
            self.kill_leftovers(f"{running} of {limit} processes ran")

    def grading_pids(self) -> list[int]:
        """Return the processes of the commands that were started since grading began."""
        return [pid for pid in processes.other_pids() if processes.session_id(pid) in self.grading_sessions]

    def _exhausted_limit(self) -> str:
        """Describe which of the agent's own limits is nearly exhausted; "" if none."""
        disk, spec = os.statvfs(processes.DISK), self._spec
        free = disk.f_bavail * disk.f_frsize
        running = sum(map(processes.count_threads, processes.other_pids()))
        if free < min(EXTRA_DISK_MB << 20, spec.disk_mb << 17):
            return f"the disk was full ({free >> 10} kB of {spec.disk_mb} MB left)"
        if disk.f_files and disk.f_ffree < disk.f_files // 8:
            return f"the disk was nearly out of inodes ({disk.f_ffree} of {disk.f_files} free)"
        if running > spec.pids * 3 // 4:
            return f"{running} of {spec.pids} processes ran"
        if (used := processes.memory_used()) > spec.memory_bytes * 7 // 8:
            return f"memory was at {used >> 20} of {spec.memory_bytes >> 20} MB"
        return ""

    def _exhausted_reserve(self) -> str:
        """Describe which of the extra limits is half used; "" if none."""
        disk = os.statvfs(processes.DISK)
        free = disk.f_bavail * disk.f_frsize
        running = sum(map(processes.count_threads, processes.other_pids()))
        if free < EXTRA_DISK_MB << 19 or (disk.f_files and disk.f_ffree < EXTRA_FILES // 2):
            return (
                f"more than half of the extra disk for grading was used ({free >> 20} MB and {disk.f_ffree} files left)"
            )
        if running > self._spec.pids:
            return f"{running} processes ran, above the agent's limit of {self._spec.pids}"
        return ""

    def kill_leftovers(self, reason: str) -> None:
        """Kill all processes except the verifier's, repeatedly: some fork faster than /proc is read."""
        killed: set[int] = set()
        until = time.monotonic() + _KILL_S
        while (pids := self._leftover_pids()) and time.monotonic() < until:
            killed.update(pids)
            self._kill_agent()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
            self._reap()
        if killed:
            self._note(f"{reason}: killed {len(killed)} processes that the agent left running")
        elif self.grading:
            self._note(reason)

    def _leftover_pids(self) -> list[int]:
        return [pid for pid in processes.other_pids() if processes.session_id(pid) not in self.grading_sessions]

    def _raise_limits(self) -> None:
        if self._increases >= _MAX_INCREASES:
            return
        self._increases += self.request(RAISE_LIMITS)

    def request(self, what: bytes) -> bool:
        """Send a request to the monitor and wait for it. Return whether it succeeded."""
        try:
            self._monitor.send(what)
            return self._monitor.recv(1) == DONE
        except OSError as error:
            self._note(f"{_REQUEST_ERRORS[what]}: {error}")
            return False
