"""The sandbox's /proc, /sys and /dev: its own, and nothing in them that reaches the machine.

Invariant: nothing here can be written that changes something outside the sandbox, even by a process whose user id is
root's: the kernel checks many of these files against the user id alone.
"""

import os
import stat

from harbortrainer.sandbox.inside import kernel as k

_FLAGS = k.MS_NOSUID | k.MS_NODEV
# Read-only: a device can still be read and written, but not chmod-ed for the whole machine.
_DEVICE_FLAGS = k.MS_RDONLY | k.MS_NOSUID | k.MS_NOEXEC
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_PROC_HIDDEN = ("keys", "key-users", "latency_stats", "timer_list", "timer_stats", "sched_debug", "kallsyms")
_PROC_READ_ONLY = ("sys", "bus", "fs", "irq", "driver", "tty")
_PROC_EMPTY = ("acpi", "scsi", "asound")


def proc(root: str, base: str) -> int:
    """Mount /proc and an empty /sys. Returns a descriptor of a /proc whose sysctls can still be set."""
    guarded_proc(_folder(root, "proc"))
    # A second mount of the same /proc, never visible.
    os.mkdir(f"{base}/proc")
    k.mount("proc", f"{base}/proc", "proc", _FLAGS | k.MS_NOEXEC)
    private = os.open(f"{base}/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    k.mount("tmpfs", _folder(root, "sys"), "tmpfs", _FLAGS | k.MS_RDONLY | k.MS_NOEXEC, "size=4k,mode=755")
    return private


def guarded_proc(path: str) -> None:
    """Mount the /proc of this process's namespace, with everything writable or private in it covered."""
    k.mount("proc", path, "proc", _FLAGS | k.MS_NOEXEC)
    with os.scandir(path) as entries:
        for entry in entries:
            if not entry.name.isdigit() and not entry.is_symlink():
                _guard(entry)


def _guard(entry: "os.DirEntry[str]") -> None:
    """What others may not read is hidden, what root may write is made read-only."""
    mode = entry.stat().st_mode
    if entry.name in _PROC_EMPTY:
        k.mount("tmpfs", entry.path, "tmpfs", _FLAGS | k.MS_RDONLY | k.MS_NOEXEC, "size=4k")
    elif entry.name in _PROC_HIDDEN or (stat.S_ISREG(mode) and not mode & stat.S_IROTH):
        k.bind("/dev/null", entry.path, flags=_DEVICE_FLAGS)
    elif entry.name in _PROC_READ_ONLY or (stat.S_ISREG(mode) and mode & 0o222):
        k.bind(entry.path, entry.path, flags=k.MS_RDONLY | _FLAGS | k.MS_NOEXEC)


def devices(root: str, base: str) -> None:
    """Mount a /dev with the harmless devices, terminals of its own, and shared memory out of the disk's allowance."""
    dev = _folder(root, "dev")
    k.mount("tmpfs", dev, "tmpfs", k.MS_NOSUID | k.MS_NOEXEC, "size=64k,mode=755")
    for name in _DEVICES:
        os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        k.bind(f"/dev/{name}", f"{dev}/{name}", flags=_DEVICE_FLAGS)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{dev}/{name}")
    terminals(f"{dev}/pts")
    os.mkdir(f"{base}/shm")
    os.chmod(f"{base}/shm", 0o1777)
    k.bind(f"{base}/shm", f"{dev}/shm", flags=_FLAGS)


def terminals(path: str) -> None:
    """Mount terminals that are nobody else's."""
    k.mount("devpts", path, "devpts", k.MS_NOSUID | k.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")


def _folder(root: str, name: str) -> str:
    path = f"{root}/{name}"
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
        os.unlink(path)
    os.makedirs(path, exist_ok=True)
    return path
