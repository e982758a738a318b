"""Pipes and leased files that processes wait for, read from outside the processes' sandbox.

A verifier that opens a pipe without a writer, or a file on which another process holds a lease, waits until its time is
up. Only a pipe that was made while the agent worked is reported: a verifier may wait for pipes of its own.

Invariant: nothing is opened for reading or writing, and no link is followed out of the sandbox.
"""

import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harbortrainer.sandbox.inside import syscalls as k
from harbortrainer.sandbox.inside.processes import read

# Numbers of the calls that open a path, with the place of the path among their arguments: open, creat, openat, openat2.
_OPENS = {"x86_64": {2: 0, 85: 0, 257: 1, 437: 1}, "aarch64": {56: 1, 437: 1}}
# Numbers of read, write, pread64, pwrite64, readv and writev, whose first argument is a descriptor.
_TRANSFERS = {"x86_64": (0, 1, 17, 18, 19, 20), "aarch64": (63, 64, 67, 68, 65, 66)}
_MAX_PATH, _PAGE = 4096, 4096
_CURRENT_FOLDER = -100
_MAX_TEXT = 200
_LOOKS, _PAUSE_S = 100, 0.003


@dataclass(frozen=True)
class Period:
    """Time in which the agent worked, in nanoseconds of the files' clock."""

    start: int
    end: int


def describe_waits(pids: Iterable[int], period: Period) -> list[str]:
    """Describe the pipes of the period and the leased files that the processes wait for.

    A running thread is looked at again, for 0.3 s at most: at each tick the kernel wakes one that waits to read a file
    that is leased for writing. Pipes count at the first look only: a busy verifier may use one now and then.
    """
    found: list[str] = []
    threads = [(pid, thread) for pid in pids for thread in _threads(pid)]
    for _ in range(_LOOKS):
        waits = [_describe_wait(pid, thread, period) for pid, thread in threads]
        found += filter(None, waits)
        threads = [thread for thread, wait in zip(threads, waits, strict=True) if wait is None]
        if found or not threads:
            break
        time.sleep(_PAUSE_S)
        period = Period(0, 0)
    return list(dict.fromkeys(found))


def descendants(pid: int) -> Iterator[int]:
    """Yield the descendants of a process in the same process namespace."""
    depth = _depth(pid)
    for child in children(pid):
        if _depth(child) == depth != 0:
            yield child
            yield from descendants(child)


def _depth(pid: int) -> int:
    """Return how many process namespaces a process is in; 0 if it has ended.

    An ordinary user cannot read the namespaces of an init process that hides its memory. A child's are its parent's, or
    one more.
    """
    lines = read(f"/proc/{pid}/status").splitlines()
    return next((len(line.split()) - 1 for line in lines if line.startswith("NSpid:")), 0)


def children(pid: int) -> Iterator[int]:
    """Yield the children of a process, whichever thread has started them."""
    for thread in _threads(pid):
        yield from map(int, read(f"/proc/{pid}/task/{thread}/children").split())


def process_namespace(pid: int) -> str:
    """Return the identity of a process's process namespace; "" if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []  # it has ended


def _describe_wait(pid: int, thread: str, period: Period) -> str | None:
    """Describe what a thread waits for; "" if that is nothing of interest, None if it runs."""
    number, *arguments = read(f"/proc/{pid}/task/{thread}/syscall").split() or [""]
    state = read(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].split()[:1]
    if number == "running" or state == ["R"]:
        return None
    if not number.isdigit() or state != ["S"]:
        return ""
    call, values = int(number), [int(argument, 16) for argument in arguments]
    machine = os.uname().machine
    try:
        if call in _TRANSFERS.get(machine, ()):
            path, info = _opened(pid, values[0])
        elif (place := _OPENS.get(machine, {}).get(call)) is not None:
            path, info = _to_open(pid, values, place)
        else:
            return ""
    except OSError:
        return ""
    shown = ascii(path)[:_MAX_TEXT]
    if stat.S_ISFIFO(info.st_mode) and path.startswith("/") and period.start < info.st_ctime_ns < period.end:
        return f"the verifier waited for the pipe {shown}, which was made while the agent worked"
    if stat.S_ISREG(info.st_mode) and call not in _TRANSFERS.get(machine, ()):
        return f"the verifier waited to open {shown}, on which another process holds a lease"
    return ""


def _opened(pid: int, fd: int) -> tuple[str, os.stat_result]:
    link = f"/proc/{pid}/fd/{fd}"
    return os.readlink(link), os.stat(link)


def _to_open(pid: int, arguments: list[int], place: int) -> tuple[str, os.stat_result]:
    path = _string(pid, arguments[place])
    if not path.startswith("/"):
        folder = (arguments[0] & 0xFFFFFFFF) if place else _CURRENT_FOLDER & 0xFFFFFFFF
        link = "cwd" if folder == _CURRENT_FOLDER & 0xFFFFFFFF else f"fd/{folder}"
        path = f"{os.readlink(f'/proc/{pid}/{link}')}/{path}"
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = k.open_in_root(root, path, os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(root)
    try:
        return path, os.fstat(fd)
    finally:
        os.close(fd)


def _string(pid: int, address: int) -> str:
    """Return the text at an address of a process."""
    memory, text = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC), b""
    try:
        while len(text) < _MAX_PATH and b"\0" not in text:  # to the end of each page: the next may not be mapped
            text += os.pread(memory, _PAGE - (address + len(text)) % _PAGE, address + len(text))
    finally:
        os.close(memory)
    return os.fsdecode(text.partition(b"\0")[0])
