"""The sandbox's view of the filesystem. Called in the sandbox's own mount namespace; returns inside the new root.

Invariant: when `enter` has returned, no path, mount or descriptor of the host's is reachable except the overlay's lower
layers, through the overlay, and the binds that were asked for.
"""

import os
import stat
from typing import Any

from harbortrainer.sandbox.inside import kernel as k
from harbortrainer.sandbox.inside import copying, masking

_BASE = "/tmp"  # any folder will do: it is hidden in this mount namespace only
_ROOT, _BOTTOM = _BASE + "/root", _BASE + "/bottom"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEV_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_PROC_HIDDEN = ("keys", "key-users", "latency_stats", "timer_list", "timer_stats", "sched_debug", "kallsyms")
_PROC_READ_ONLY = ("sys", "bus", "fs", "irq", "driver", "tty")
_PROC_EMPTY = ("acpi", "scsi", "asound")
_FLAGS = k.MS_NOSUID | k.MS_NODEV
# Read-only: a device can still be read and written, but not chmod-ed for the whole machine.
_DEVICE_FLAGS = k.MS_RDONLY | k.MS_NOSUID | k.MS_NOEXEC


def enter(spec: dict[str, Any], *, privileged: bool) -> int:
    """Build the filesystem that `spec` describes and make it the root. Returns a descriptor of a writable /proc."""
    k.mount("none", "/", None, k.MS_REC | k.MS_PRIVATE)
    layers = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in spec["layers"]]
    copied = os.open(spec["copied"], os.O_PATH | os.O_DIRECTORY) if spec["copied"] else None
    below = [*([masking.path_of(spec["mask"])] if spec["mask"] else []), spec["rootfs"]]
    bottom = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in below]
    binds = [(os.open(b["source"], os.O_PATH), b) for b in spec["binds"]]
    upper = os.open(spec["upper"], os.O_PATH) if spec["upper"] else None
    k.mount("tmpfs", _BASE, "tmpfs", _FLAGS, f"size={spec['disk_mb']}m,nr_inodes={spec['inodes']},mode=755")
    _overlays(layers, bottom, upper, copied, privileged=privileged)
    proc = _proc()
    _devices()
    _binds(binds)
    for path in spec["dirs"]:
        os.makedirs(_inside(path), exist_ok=True)
        os.chmod(_inside(path), 0o777)
    for path, text in spec["files"].items():
        _write(_inside(path), text)
    k.change_root(_ROOT)
    for fd in [*layers, *bottom, *(fd for fd, _ in binds), *([] if upper is None else [upper])]:
        os.close(fd)
    return proc


def _overlays(layers: list[int], bottom: list[int], upper: int | None, copied: int | None, *, privileged: bool) -> None:
    """Stack the layers. Layers of a task lie below the host's own root, which the kernel refuses in one overlay."""
    options = "xino=off" if privileged else "xino=off,userxattr"
    top = _BASE if upper is None else f"/proc/self/fd/{upper}"
    for path in (_ROOT, _BOTTOM, f"{top}/upper", f"{top}/work"):
        os.makedirs(path, exist_ok=True)
    if copied is not None:
        copying.copy_tree(copied, f"{top}/upper")
        os.close(copied)
    lower = _join(bottom)
    if (layers or upper is not None) and len(bottom) > 1:
        k.mount("overlay", _BOTTOM, "overlay", _FLAGS | k.MS_RDONLY, f"lowerdir={lower},{options}")
        lower = _BOTTOM
    lower = ":".join(filter(None, [_join(layers), lower]))
    options = f"lowerdir={lower},upperdir={top}/upper,workdir={top}/work,{options}"
    k.mount("overlay", _ROOT, "overlay", _FLAGS, options)


def _join(fds: list[int]) -> str:
    return ":".join(f"/proc/self/fd/{fd}" for fd in fds)


def _inside(path: str) -> str:
    """The path under the new root; no component may be a link, so that nothing planted in a layer leads out."""
    joined = _ROOT
    for part in path.strip("/").split("/"):
        if part in ("", ".", ".."):
            continue
        joined += "/" + part
        if os.path.islink(joined):
            os.unlink(joined)
    return joined


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def _folder(name: str) -> str:
    path = _inside(name)
    if os.path.exists(path) and not os.path.isdir(path):
        os.unlink(path)
    os.makedirs(path, exist_ok=True)
    return path


def _proc() -> int:
    path = _folder("proc")
    k.mount("proc", path, "proc", _FLAGS | k.MS_NOEXEC)
    # A second mount of the same /proc, never visible: the one place where sysctls can still be set by us.
    os.mkdir(_BASE + "/proc")
    k.mount("proc", _BASE + "/proc", "proc", _FLAGS | k.MS_NOEXEC)
    private = os.open(_BASE + "/proc", os.O_PATH | os.O_DIRECTORY)
    for entry in os.scandir(path):
        if not entry.name.isdigit() and not entry.is_symlink():
            _guard(entry)
    k.mount("tmpfs", _folder("sys"), "tmpfs", _FLAGS | k.MS_RDONLY | k.MS_NOEXEC, "size=4k,mode=755")
    return private


def _guard(entry: "os.DirEntry[str]") -> None:
    """Everything in /proc that is not about a process: what others may not read is hidden, what root may write is not.

    The kernel checks many of these files against the user id alone, and root inside may be root outside.
    """
    mode = entry.stat().st_mode
    if entry.name in _PROC_EMPTY:
        k.mount("tmpfs", entry.path, "tmpfs", _FLAGS | k.MS_RDONLY | k.MS_NOEXEC, "size=0")
    elif entry.name in _PROC_HIDDEN or (stat.S_ISREG(mode) and not mode & stat.S_IROTH):
        k.bind("/dev/null", entry.path, flags=_DEVICE_FLAGS)
    elif entry.name in _PROC_READ_ONLY or (stat.S_ISREG(mode) and mode & 0o222):
        k.bind(entry.path, entry.path, flags=k.MS_RDONLY | _FLAGS | k.MS_NOEXEC)


def _devices() -> None:
    dev = _folder("dev")
    k.mount("tmpfs", dev, "tmpfs", k.MS_NOSUID | k.MS_NOEXEC, "size=64k,mode=755")
    for name in _DEVICES:
        os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        k.bind(f"/dev/{name}", f"{dev}/{name}", flags=_DEVICE_FLAGS)
    for name, target in _DEV_LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{dev}/{name}")
    k.mount("devpts", f"{dev}/pts", "devpts", k.MS_NOSUID | k.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    # Shared memory comes out of the same allowance as the disk.
    os.mkdir(_BASE + "/shm")
    os.chmod(_BASE + "/shm", 0o1777)
    k.bind(_BASE + "/shm", f"{dev}/shm")


def _binds(binds: list[tuple[int, dict[str, Any]]]) -> None:
    for fd, bind in binds:
        source, target = f"/proc/self/fd/{fd}", _inside(bind["target"])
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            _write(target, "")
        flags = _FLAGS | (k.MS_RDONLY if bind.get("read_only") else 0)
        k.bind(source, target, flags=flags)
