"""Finds processes that the agent left running and that open the verifier's reward in a container.

Only root on the daemon's machine can do this. The kernel's fanotify holds each opening of a file in the folder until it
is answered, so the process still exists when it is looked up. Every opening is allowed, since a verifier may work
through a terminal that the agent opened. The record names the process.

For each opening the kernel opens the file for this process too, on the container's mount. A device that the agent made
would be opened on this machine, so the folder is watched only if its mount allows no devices (`forbid_devices`).
"""

import ctypes
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harbortrainer.sandbox.containers.verifier_waits import mounts
from harbortrainer.sandbox.inside.processes import read

_CLASS_CONTENT, _CLOEXEC, _NONBLOCK = 0x04, 0x01, 0x02
_MARK_ADD, _OPEN_PERM, _EVENT_ON_CHILD = 0x01, 0x00010000, 0x08000000
_AT_FDCWD, _ALLOW = -100, 1
_EVENT = struct.Struct("=IBBHQii")  # length, version, reserved, metadata length, mask, descriptor, process
_ANSWER = struct.Struct("=iI")
_REWARDS = {"reward.txt", "reward.json"}
_FOLDER = "/logs/verifier"

_REMOUNT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
os.setns(os.open(f"/proc/{sys.argv[1]}/ns/mnt", os.O_RDONLY), os.CLONE_NEWNS)
flags = os.statvfs(sys.argv[2]).f_flag & 0b1111 | 4 | 32 | 4096  # as mounted, MS_NODEV, MS_REMOUNT, MS_BIND
sys.exit(libc.mount(b"none", sys.argv[2].encode(), None, ctypes.c_ulong(flags), None) != 0)
"""

_libc = ctypes.CDLL(None, use_errno=True)


def forbid_devices(pid: int) -> bool:
    """Remount the verifier's folder in the container of process `pid` without devices; return whether it is so now.

    Call it before the agent starts. Blocks.
    """
    before = [mount for mount, (path, _) in mounts(pid).items() if path == _FOLDER]
    if len(before) != 1:
        return False  # not mounted, or moved by the image's own program
    command = [sys.executable, "-I", "-S", "-c", _REMOUNT, str(pid), _FOLDER]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60)
    return "nodev" in mounts(pid).get(before[0], ("", []))[1]


class RewardWatch:
    """Watches a folder from `start` to `stop`. Closing it, also by the end of this process, allows what waits.

    Args:
        is_leftover: Whether a process, by its id on this machine, is one that the agent left running.
    """

    def __init__(self, is_leftover: Callable[[int], bool]) -> None:
        self._is_leftover = is_leftover
        self._group = -1
        self._stop_read, self._stop_write = -1, -1
        self._thread: threading.Thread | None = None
        self.found: list[str] = []
        """Descriptions of openings by leftover processes, the first of each watch."""

    def start(self, folder: Path) -> None:
        """Start watching a folder; no effect if the kernel refuses or it is watched already."""
        if self._thread is not None:
            return
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe as the reward must not hold this thread
        self._group = _libc.fanotify_init(_CLASS_CONTENT | _CLOEXEC | _NONBLOCK, flags)
        if self._group < 0:
            return
        mask = ctypes.c_uint64(_OPEN_PERM | _EVENT_ON_CHILD)
        if _libc.fanotify_mark(self._group, _MARK_ADD, mask, _AT_FDCWD, os.fsencode(folder)) < 0:
            os.close(self._group)
            return
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._answer_all, name="reward-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. Call it before this process opens files in the folder."""
        if self._thread is None:
            return
        os.close(self._stop_write)
        self._thread.join()
        self._thread = None

    def _answer_all(self) -> None:
        named = False
        try:
            while self._stop_read not in select.select([self._group, self._stop_read], [], [])[0]:
                with suppress(OSError):  # none, or the kernel could not open the file, which then stays closed
                    data = os.read(self._group, 4096)
                    while data:
                        length, *_, fd, pid = _EVENT.unpack_from(data)
                        data = data[length:]
                        if fd < 0:  # more events than the queue holds
                            continue
                        named = named or self._name(fd, pid)
                        with suppress(OSError):  # the process was killed meanwhile
                            os.write(self._group, _ANSWER.pack(fd, _ALLOW))
                        os.close(fd)
        finally:
            os.close(self._group)
            os.close(self._stop_read)

    def _name(self, fd: int, pid: int) -> bool:
        """Note an opening of a reward by a leftover process; return whether it was one."""
        try:
            name = Path(f"/proc/self/fd/{fd}").readlink().name
            if name not in _REWARDS or not self._is_leftover(pid):
                return False
        except OSError:
            return False
        program = read(f"/proc/{pid}/comm").strip()
        self.found.append(f"/logs/verifier/{name}: opened during grading by {program}, which the agent left running")
        return True
