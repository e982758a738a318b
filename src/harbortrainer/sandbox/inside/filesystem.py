"""The sandbox's filesystem: its root, its /proc, /sys and /dev, and the copies of small layers.

`enter` runs in the sandbox's own mount namespace and returns inside the new root. If the root is the host's, only the
folders that the `HostView` shows appear, each under its own overlay; the rest is empty and in memory. Any other root
filesystem, or the layers of an image, appear completely, under one overlay.

A small layer is copied into the upper folder and not mounted. Below an overlay a hard link breaks and inode numbers
change on the first write; copying a few files also costs less than the mounts.

Invariants:
- After `enter`, the host is reachable only through the overlays' lower layers and the requested binds.
- Every change is written to memory, or to the layer or root filesystem that is being built.
- No write to /proc, /sys or /dev has an effect outside the sandbox, even by user id 0. The kernel checks many of these
  files against the user id alone.
"""

import os
import stat

from harbortrainer.sandbox.inside import grading_limits, mask_layers, verifier_root
from harbortrainer.sandbox.inside import syscalls as k
from harbortrainer.sandbox.inside.messages import HostView, SandboxSpec

_FLAGS = k.MS_NOSUID | k.MS_NODEV
# A read-only bind still allows device I/O, but no chmod, which would affect the host.
_DEVICE_FLAGS = k.MS_RDONLY | k.MS_NOSUID | k.MS_NOEXEC
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_TERMINALS = 128
_PROC_HIDDEN = ("keys", "key-users", "latency_stats", "timer_list", "timer_stats", "sched_debug", "kallsyms")
_PROC_READ_ONLY = ("sys", "bus", "fs", "irq", "driver", "tty")
_PROC_EMPTY = ("acpi", "scsi", "asound")


def mount_proc(root: str, base: str) -> int:
    """Mount a guarded /proc and an empty /sys. Return a descriptor of another /proc, whose sysctls are writable."""
    mount_guarded_proc(_make_folder(root, "proc"))
    # A second mount of the same /proc, outside the new root.
    os.mkdir(f"{base}/proc")
    k.mount("proc", f"{base}/proc", "proc", _FLAGS | k.MS_NOEXEC)
    private = os.open(f"{base}/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    k.mount("tmpfs", _make_folder(root, "sys"), "tmpfs", _FLAGS | k.MS_RDONLY | k.MS_NOEXEC, "size=4k,mode=755")
    return private


def mount_guarded_proc(path: str) -> None:
    """Mount /proc of this process's namespace; cover its private entries and make its writable ones read-only."""
    k.mount("proc", path, "proc", _FLAGS | k.MS_NOEXEC)
    with os.scandir(path) as entries:
        for entry in entries:
            if not entry.name.isdigit() and not entry.is_symlink():
                _guard(entry)


def _guard(entry: "os.DirEntry[str]") -> None:
    """Hide an entry that only root may read; make an entry that root may write read-only."""
    mode = entry.stat().st_mode
    if entry.name in _PROC_EMPTY:
        k.mount("tmpfs", entry.path, "tmpfs", _FLAGS | k.MS_RDONLY | k.MS_NOEXEC, "size=4k")
    elif entry.name in _PROC_HIDDEN or (stat.S_ISREG(mode) and not mode & stat.S_IROTH):
        k.bind("/dev/null", entry.path, flags=_DEVICE_FLAGS)
    elif entry.name in _PROC_READ_ONLY or (stat.S_ISREG(mode) and mode & 0o222):
        k.bind(entry.path, entry.path, flags=k.MS_RDONLY | _FLAGS | k.MS_NOEXEC)


def make_devices(root: str, base: str) -> None:
    """Mount a /dev with the harmless devices, private terminals, and a /dev/shm that counts as disk usage."""
    dev = _make_folder(root, "dev")
    k.mount("tmpfs", dev, "tmpfs", k.MS_NOSUID | k.MS_NOEXEC, "size=64k,mode=755")
    for name in _DEVICES:
        os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        k.bind(f"/dev/{name}", f"{dev}/{name}", flags=_DEVICE_FLAGS)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{dev}/{name}")
    mount_devpts(f"{dev}/pts")
    os.mkdir(f"{base}/shm")
    os.chmod(f"{base}/shm", 0o1777)
    k.bind(f"{base}/shm", f"{dev}/shm", flags=_FLAGS)


def mount_devpts(path: str) -> None:
    """Mount a private devpts instance. It may hold only some of the terminals that the kernel has for all sandboxes."""
    options = f"newinstance,ptmxmode=0666,mode=620,max={_TERMINALS}"
    k.mount("devpts", path, "devpts", k.MS_NOSUID | k.MS_NOEXEC, options)


def _make_folder(root: str, name: str) -> str:
    path = f"{root}/{name}"
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
        os.unlink(path)
    os.makedirs(path, exist_ok=True)
    return path


_COPIED_XATTRS = ("trusted.overlay.opaque", "user.overlay.opaque", "security.capability")
_CHUNK = 1 << 20


def copy_tree(source: str, target: str) -> None:
    """Copy the content of a folder into another, with owners, modes, times, links and overlay xattrs."""
    _copy_folder(source, target, {})


def copy_file(source: str, target: str) -> None:
    """Copy one file with its mode and times."""
    info = os.stat(source)
    _copy_content(source, target)
    _copy_metadata(source, target, info)


def _copy_folder(source: str, target: str, first_links: dict[tuple[int, int], str]) -> None:
    with os.scandir(source) as entries:
        for entry in entries:
            info, path = entry.stat(follow_symlinks=False), f"{target}/{entry.name}"
            first = first_links.setdefault((info.st_dev, info.st_ino), path)
            if first != path and not stat.S_ISDIR(info.st_mode):
                os.link(first, path, follow_symlinks=False)
                continue
            _copy_entry(entry.path, path, info)
            if stat.S_ISDIR(info.st_mode):
                _copy_folder(entry.path, path, first_links)
            _copy_metadata(entry.path, path, info)


def _copy_entry(source: str, target: str, info: os.stat_result) -> None:
    if stat.S_ISDIR(info.st_mode):
        os.mkdir(target)
    elif stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(info.st_mode):
        _copy_content(source, target)
    else:  # a whiteout (device 0, 0) or a named pipe
        os.mknod(target, info.st_mode, info.st_rdev)


def _copy_content(source: str, target: str) -> None:
    read = os.open(source, os.O_RDONLY)
    write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        while os.sendfile(write, read, None, _CHUNK):
            pass
    finally:
        os.close(read)
        os.close(write)


def _copy_metadata(source: str, target: str, info: os.stat_result) -> None:
    os.chown(target, info.st_uid, info.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(target, stat.S_IMODE(info.st_mode))
    for name in os.listxattr(source, follow_symlinks=False):
        if name in _COPIED_XATTRS:
            os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)


VERIFIER_FOLDERS = ("/tests", "/logs/verifier")
"""The verifier's folders, which the agent's processes cannot see."""
_PINNED_MOUNTS = ("/tests", "/logs", "/logs/verifier")
"""Mount points in the agent's and the grader's namespaces. A mount point cannot be renamed or removed, so neither side
can move or undo the other's mount on it."""
_BASE = "/tmp"  # any folder works: it is covered in this mount namespace only


def enter(spec: SandboxSpec, view: HostView | None, *, privileged: bool) -> tuple[int, int]:
    """Build the filesystem that `spec` describes and make it the root.

    Returns:
        Descriptors of a writable /proc and of the tmpfs that holds the changes.
    """
    k.mount("none", "/", None, k.MS_REC | k.MS_PRIVATE)
    builder = _RootBuilder(spec, view, privileged=privileged)
    binds = {target: os.open(source, os.O_PATH) for target, source in spec.binds.items()}
    k.mount("tmpfs", _BASE, "tmpfs", _FLAGS, f"{disk_options(spec, 0)},mode=755")
    disk = os.open(_BASE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    root = builder.build(_BASE)
    proc = mount_proc(root, _BASE)
    make_devices(root, _BASE)
    roots = [root]
    if spec.has_verifier_root:
        k.mount("tmpfs", f"{root}/sys", "tmpfs", _FLAGS, f"{disk_options(spec, 0)},mode=755")
        roots.append(builder.build(f"{root}/sys"))
    builder.close()
    for target, fd in binds.items():
        for top in roots:
            path = _follow_links(top, target) if spec.in_place else _resolve_inside(top, target)
            _bind(fd, path, read_only=target in spec.read_only)
        os.close(fd)
    for path in spec.dirs:
        os.makedirs(_resolve_inside(root, path), exist_ok=True)
        os.chmod(_resolve_inside(root, path), 0o777)
    for path, text in spec.files.items():
        for top in roots:
            _write(_resolve_inside(top, path), text)
    for path in _PINNED_MOUNTS if spec.isolates_agent else ():
        os.makedirs(_resolve_inside(root, path), exist_ok=True)
        k.bind(_resolve_inside(root, path), _resolve_inside(root, path))
    k.change_root(root)
    return proc, disk


def enter_grader_namespace(spec: SandboxSpec) -> list[int]:
    """Enter a copy of the sandbox's mount namespace with private mounts on the verifier's folders.

    Returns:
        Descriptors of this mount namespace and of the agent's root, if the verifier has its own root.
    """
    os.unshare(os.CLONE_NEWNS)
    for path in VERIFIER_FOLDERS:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        k.mount("tmpfs", path, "tmpfs", _FLAGS, f"size={spec.disk_mb}m,mode={mode:o}")
    if not spec.has_verifier_root:
        return []
    return [os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC), verifier_root.enter()]


def enter_agent_namespace(spec: SandboxSpec) -> None:
    """Mount the agent's own /proc and terminals, in the mount namespace that the grader has left."""
    if spec.has_verifier_root:
        verifier_root.cover_in_agent_namespace()
    mount_guarded_proc("/proc")
    mount_devpts("/dev/pts")


def disk_options(spec: SandboxSpec, increases: int) -> str:
    """Return the tmpfs size options after `increases` increases of the limits for grading."""
    extra_mb, extra_files = increases * grading_limits.EXTRA_DISK_MB, increases * grading_limits.EXTRA_FILES
    return f"size={spec.disk_mb + extra_mb}m,nr_inodes={1000 * spec.disk_mb + extra_files}"


def _resolve_inside(root: str, path: str) -> str:
    """Return the path under the new root. Links in it are removed: one planted in a layer could point outside."""
    joined = root
    for part in path.split("/"):
        if part in ("", ".", ".."):
            continue
        joined += "/" + part
        if os.path.islink(joined):
            os.unlink(joined)
    return joined


_MAX_LINKS = 40


def _follow_links(root: str, path: str) -> str:
    """Return the path under the new root that `path` leads to inside. The root's own links stay as they are."""
    joined, todo, links = "", path.split("/")[::-1], 0
    while todo:
        part = todo.pop()
        here = f"{root}{joined}/{part}"
        if part == "..":
            joined = joined.rpartition("/")[0]
        elif os.path.islink(here) and links < _MAX_LINKS:
            links += 1
            target = os.readlink(here)
            joined = "" if target.startswith("/") else joined
            todo += target.split("/")[::-1]
        elif part not in ("", "."):
            joined += "/" + part
    return root + joined


def _bind(fd: int, target: str, *, read_only: bool) -> None:
    source = f"/proc/self/fd/{fd}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        _write(target, "")
    k.bind(source, target, flags=_FLAGS | (k.MS_RDONLY if read_only else 0))


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


class _RootBuilder:
    """Builds the root from the root filesystem, the image's layer and an upper folder for changes.

    Opens every host path before the mounts that will hide it.

    A layer is a folder with `root` (files outside the shown folders) and `over/NAME` (changes to a shown folder, with
    its slashes written as `%`). A layer that is being built gets the same form.
    """

    def __init__(self, spec: SandboxSpec, view: HostView | None, *, privileged: bool) -> None:
        self._view, self._options = view, "xino=off" if privileged else "xino=off,userxattr"
        if spec.lowers and privileged:
            self._options += ",index=on"  # keeps hard links between files of a layer intact when one is written
        self._fds: list[int] = []
        layer = self._open(spec.layer) if spec.layer else None
        self._copied, self._mounted = (layer, None) if spec.small else (None, layer)
        self._target = self._open(spec.upper) if spec.upper else None
        self._in_place = spec.in_place
        self._rootfs = [self._open(path) for path in spec.lowers or [spec.rootfs]] if view is None else []
        self._shown = {path: self._open(path) for path in view.shown} if view else {}
        self._plain = {path: self._open(path, os.O_RDONLY) for path in view.plain} if view else {}

    def build(self, base: str) -> str:
        """Build the root in `base`, an empty tmpfs. Return its mount point."""
        top, root = self._target or base, f"{base}/root"
        for path in (root, f"{top}/upper", f"{top}/upper/over", f"{top}/upper/root", f"{top}/work"):
            os.makedirs(path, exist_ok=True)
        for name in ("root", "over"):
            if self._copied and os.path.isdir(f"{self._copied}/{name}"):
                copy_tree(f"{self._copied}/{name}", f"{top}/upper/{name}")
        self._mount_root(top, root)
        for path, shown in self._shown.items():
            name = path.strip("/").replace("/", "%")
            os.makedirs(root + path, exist_ok=True)
            lowers = [*self._layers(f"over/{name}"), *self._masks(path), shown]
            self._mount_overlay(lowers, f"{top}/upper/over/{name}", f"{top}/work/{name}", root + path)
        return root

    def close(self) -> None:
        """Close the host's paths."""
        for fd in self._fds:
            os.close(fd)

    def _mount_root(self, top: str, root: str) -> None:
        lowers = [*self._layers("root"), *self._rootfs]
        if self._in_place:
            k.bind(self._rootfs[0], root, flags=k.MS_NODEV)
        elif lowers:
            self._mount_overlay(lowers, f"{top}/upper/root", f"{top}/work/root", root)
        else:
            k.bind(f"{top}/upper/root", root)
        if self._view is None:
            return
        for path, mode in self._view.folders.items():
            if not os.path.isdir(root + path):
                os.makedirs(root + path, exist_ok=True)
                os.chmod(root + path, mode)
        for path, target in self._view.links.items():
            if not os.path.lexists(root + path):
                os.symlink(target, root + path)
        for path, file in self._plain.items():
            if not os.path.lexists(root + path):
                copy_file(file, root + path)

    def _mount_overlay(self, lowers: list[str], upper: str, work: str, target: str) -> None:
        for path in (upper, work):
            os.makedirs(path, exist_ok=True)
        options = f"lowerdir={':'.join(lowers)},upperdir={upper},workdir={work},{self._options}"
        k.mount("overlay", target, "overlay", _FLAGS, options)

    def _layers(self, name: str) -> list[str]:
        path = f"{self._mounted}/{name}"
        return [path] if self._mounted and os.path.isdir(path) else []

    def _masks(self, path: str) -> list[str]:
        assert self._view is not None
        mask = mask_layers.layer_path(self._view.key) + path
        return [mask] if os.path.isdir(mask) else []

    def _open(self, path: str, flags: int = os.O_PATH | os.O_DIRECTORY) -> str:
        self._fds.append(os.open(path, flags | os.O_CLOEXEC))
        return f"/proc/self/fd/{self._fds[-1]}"
