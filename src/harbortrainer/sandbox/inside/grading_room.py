"""Room for grading that the agent cannot take: more disk, memory and processes than it ever had.

When grading begins, the limits are widened by whoever may (the monitor, outside). What the agent left running stays, as
it may be what is graded; but when it has used up a limit, or uses up the room while the verifier runs, all of it is
killed. Whatever is done is noted in words: a trial that could not be graded all the same is the agent's doing.

Invariant: a process that a grading command started is never killed, unless it left its command's session.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

from harbortrainer.sandbox.inside import memory_watch, processes
from harbortrainer.sandbox.inside.messages import SandboxSpec

INTERVAL_MS = 100
WIDEN, MARK, LOOK = b"r", b"s", b"c"
"""What the monitor is asked for."""
DISK_MB, FILES, PROCESSES, MEMORY_MB = 64, 16384, 64, 64
_MOST_WIDENINGS = 8
_ASK_S = 20.0
_KILL_S = 5.0
_ASKED = {
    WIDEN: "the room for grading could not be made",
    MARK: "the agent's beginning could not be marked",
    LOOK: "what was changed could not be read",
}


class GradingRoom:
    """Watches over the room. The monitor at the other end of `monitor` widens the limits by the constants above."""

    def __init__(
        self,
        spec: SandboxSpec,
        monitor: socket.socket,
        *,
        note: Callable[[str], None],
        reap: Callable[[], object],
        sweep: Callable[[], None],
    ) -> None:
        self._spec, self._monitor, self._note, self._reap, self._sweep = spec, monitor, note, reap, sweep
        self._monitor.settimeout(_ASK_S)
        self._widenings = 0
        self.grading = False
        self.sessions: set[int] = set()
        """The commands that were started since grading began."""

    @property
    def memory_bytes(self) -> int:
        """The limit of memory as of now."""
        return self._spec.memory_bytes + self._widenings * ((MEMORY_MB + DISK_MB) << 20)

    def begin(self, *, kill: bool) -> None:
        """Grading begins: make room.

        Args:
            kill: Whether what the agent left running is killed in any case.
        """
        self.grading = True
        self.sessions.clear()
        short = "it was asked for" if kill else self._used_up()
        if short:
            self.kill_others(short)
        self._widen()

    def end(self) -> None:
        """An agent works again."""
        self.grading = False
        self.sessions.clear()

    def watch(self) -> None:
        """Called every `INTERVAL_MS` while grading: see to it that the room is the verifier's."""
        short = self._taken()
        if short and self._strangers():
            self.kill_others(short)
            self._widen()

    def bound_processes(self, running: int) -> None:
        """Called a few times a second where nothing else bounds their number: kill all when there are too many."""
        limit = self._spec.pids + self._widenings * PROCESSES
        if running > limit:
            self.kill_others(f"{running} of {limit} processes ran")

    def verifiers(self) -> list[int]:
        """The processes of the commands that were started since grading began."""
        return [pid for pid in processes.others() if processes.session(pid) in self.sessions]

    def _used_up(self) -> str:
        """Which of the agent's own limits has been reached, near enough."""
        disk, spec = os.statvfs("/"), self._spec
        free = disk.f_bavail * disk.f_frsize
        running = sum(map(processes.threads, processes.others()))
        if free < min(DISK_MB << 20, spec.disk_mb << 17):
            return f"the disk was full ({free >> 10} kB of {spec.disk_mb} MB left)"
        if disk.f_files and disk.f_ffree < disk.f_files // 8:
            return f"the disk was full of files ({disk.f_ffree} of {disk.f_files} left)"
        if running > spec.pids * 3 // 4:
            return f"{running} of {spec.pids} processes ran"
        if (used := memory_watch.used()) > spec.memory_bytes * 7 // 8:
            return f"memory was at {used >> 20} of {spec.memory_bytes >> 20} MB"
        return ""

    def _taken(self) -> str:
        """Which part of the room is half gone."""
        disk = os.statvfs("/")
        free = disk.f_bavail * disk.f_frsize
        running = sum(map(processes.threads, processes.others()))
        if free < DISK_MB << 19 or (disk.f_files and disk.f_ffree < FILES // 2):
            return f"the disk's room for grading was taken ({free >> 20} MB and {disk.f_ffree} files left)"
        if running > self._spec.pids:
            return f"the processes' room for grading was taken ({running} of {self._spec.pids})"
        return ""

    def kill_others(self, reason: str) -> None:
        """Kill all that is not the verifier's, until nothing of it is left: some fork faster than one looks."""
        killed: set[int] = set()
        until = time.monotonic() + _KILL_S
        while (left := self._strangers()) and time.monotonic() < until:
            killed.update(left)
            self._sweep()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
            self._reap()
        if killed:
            self._note(f"{reason}: what the agent had left running was killed ({len(killed)} processes)")
        elif self.grading:
            self._note(reason)

    def _strangers(self) -> list[int]:
        return [pid for pid in processes.others() if processes.session(pid) not in self.sessions]

    def _widen(self) -> None:
        if self._widenings >= _MOST_WIDENINGS:
            return
        self._widenings += self.ask(WIDEN)

    def ask(self, what: bytes) -> bool:
        """Ask the monitor for something and wait until it is done; whether it was."""
        try:
            self._monitor.send(what)
            return bool(self._monitor.recv(1))
        except OSError as error:
            self._note(f"{_ASKED[what]}: {error}")
            return False
