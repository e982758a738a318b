"""The sandbox's filesystem. Called in the sandbox's own mount namespace; returns inside the new root.

Of the host's own root filesystem only the shown folders appear, each under an overlay of its own; everything else is an
empty folder in memory. Another root filesystem, or the layers of an image, appear as a whole, under one overlay.

Invariants: when `enter` has returned, no path, mount or descriptor of the host's is reachable except the overlays'
lower layers, through the overlays, and the binds that were asked for. Every change lands in memory, or in the layer
that is being built.
"""

import os
import stat

from harbortrainer.sandbox.inside import grading_room, kernelfs, layer_copy, mask_layers
from harbortrainer.sandbox.inside import kernel as k
from harbortrainer.sandbox.inside.messages import HostView, SandboxSpec

_FLAGS = k.MS_NOSUID | k.MS_NODEV
VERIFIERS = ("/tests", "/logs/verifier")
"""What nothing of the agent's sees of the verifier's."""
_MOUNTS = ("/tests", "/logs", "/logs/verifier")
"""Mounts on both sides: what is a mount where somebody stands cannot be renamed or removed there, which would move or
undo what is mounted there elsewhere."""
_BASE = "/tmp"  # any folder will do: it is hidden in this mount namespace only


def enter(spec: SandboxSpec, view: HostView | None, *, privileged: bool) -> tuple[int, int]:
    """Build the filesystem that `spec` describes and make it the root.

    Returns:
        Descriptors of a writable /proc and of the tmpfs that changes land in.
    """
    k.mount("none", "/", None, k.MS_REC | k.MS_PRIVATE)
    tree = _Tree(spec, view, privileged=privileged)
    binds = {target: os.open(source, os.O_PATH) for target, source in spec.binds.items()}
    k.mount("tmpfs", _BASE, "tmpfs", _FLAGS, f"{disk_options(spec, 0)},mode=755")
    disk = os.open(_BASE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    root = tree.build(_BASE)
    proc = kernelfs.proc(root, _BASE)
    kernelfs.devices(root, _BASE)
    for target, fd in binds.items():
        _bind(fd, _inside(root, target), read_only=target in spec.read_only)
    for path in spec.dirs:
        os.makedirs(_inside(root, path), exist_ok=True)
        os.chmod(_inside(root, path), 0o777)
    for path, text in spec.files.items():
        _write(_inside(root, path), text)
    for path in _MOUNTS if spec.divided else ():
        os.makedirs(_inside(root, path), exist_ok=True)
        k.bind(_inside(root, path), _inside(root, path))
    k.change_root(root)
    return proc, disk


def enter_graders_part(spec: SandboxSpec) -> None:
    """Enter a mount namespace made from the sandbox's, in which the verifier's folders are its own."""
    os.unshare(os.CLONE_NEWNS)
    for path in VERIFIERS:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        k.mount("tmpfs", path, "tmpfs", _FLAGS, f"size={spec.disk_mb}m,mode={mode:o}")


def enter_agents_part() -> None:
    """Mount /proc and terminals of the agent's own, in the mount namespace that the grader has left."""
    kernelfs.guarded_proc("/proc")
    kernelfs.terminals("/dev/pts")


def disk_options(spec: SandboxSpec, widenings: int) -> str:
    """The size of the tmpfs after the room for grading was added so often."""
    room_mb, room_files = widenings * grading_room.DISK_MB, widenings * grading_room.FILES
    return f"size={spec.disk_mb + room_mb}m,nr_inodes={1000 * spec.disk_mb + room_files}"


def _inside(root: str, path: str) -> str:
    """The path under the new root; a link on the way is replaced, so that nothing planted in a layer leads out."""
    joined = root
    for part in path.split("/"):
        if part in ("", ".", ".."):
            continue
        joined += "/" + part
        if os.path.islink(joined):
            os.unlink(joined)
    return joined


def _bind(fd: int, target: str, *, read_only: bool) -> None:
    source = f"/proc/self/fd/{fd}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        _write(target, "")
    k.bind(source, target, flags=_FLAGS | (k.MS_RDONLY if read_only else 0))
    os.close(fd)


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


class _Tree:
    """Puts the root together from the root filesystem, the image's layer and room for changes.

    Opens every path of the host's before the mounts that will hide them.

    A layer is a folder with `root` (files outside the shown folders) and `over/NAME` (changes to a shown folder, its
    slashes written as `%`); a layer that is built is left in the same form.
    """

    def __init__(self, spec: SandboxSpec, view: HostView | None, *, privileged: bool) -> None:
        self._view, self._options = view, "xino=off" if privileged else "xino=off,userxattr"
        if spec.lowers and privileged:
            self._options += ",index=on"  # a hard link to a file of a layer stays one when it is written
        self._fds: list[int] = []
        layer = self._open(spec.layer) if spec.layer else None
        self._copied, self._mounted = (layer, None) if spec.small else (None, layer)
        self._target = self._open(spec.upper) if spec.upper else None
        self._whole = [self._open(path) for path in spec.lowers or [spec.rootfs]] if view is None else []
        self._shown = {path: self._open(path) for path in view.shown} if view else {}
        self._plain = {path: self._open(path, os.O_RDONLY) for path in view.plain} if view else {}

    def build(self, base: str) -> str:
        """Put the root together in `base`, an empty tmpfs. Returns where it is mounted."""
        top, root = self._target or base, f"{base}/root"
        for path in (root, f"{top}/upper", f"{top}/upper/over", f"{top}/upper/root", f"{top}/work"):
            os.makedirs(path, exist_ok=True)
        for name in ("root", "over"):
            if self._copied and os.path.isdir(f"{self._copied}/{name}"):
                layer_copy.copy_tree(f"{self._copied}/{name}", f"{top}/upper/{name}")
        self._root(top, root)
        for path, shown in self._shown.items():
            name = path.strip("/").replace("/", "%")
            os.makedirs(root + path, exist_ok=True)
            lowers = [*self._layers(f"over/{name}"), *self._masks(path), shown]
            self._overlay(lowers, f"{top}/upper/over/{name}", f"{top}/work/{name}", root + path)
        for fd in self._fds:
            os.close(fd)
        return root

    def _root(self, top: str, root: str) -> None:
        lowers = [*self._layers("root"), *self._whole]
        if lowers:
            self._overlay(lowers, f"{top}/upper/root", f"{top}/work/root", root)
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
                layer_copy.copy_file(file, root + path)

    def _overlay(self, lowers: list[str], upper: str, work: str, target: str) -> None:
        for path in (upper, work):
            os.makedirs(path, exist_ok=True)
        options = f"lowerdir={':'.join(lowers)},upperdir={upper},workdir={work},{self._options}"
        k.mount("overlay", target, "overlay", _FLAGS, options)

    def _layers(self, name: str) -> list[str]:
        path = f"{self._mounted}/{name}"
        return [path] if self._mounted and os.path.isdir(path) else []

    def _masks(self, path: str) -> list[str]:
        assert self._view is not None
        mask = mask_layers.path_of(self._view.key) + path
        return [mask] if os.path.isdir(mask) else []

    def _open(self, path: str, flags: int = os.O_PATH | os.O_DIRECTORY) -> str:
        self._fds.append(os.open(path, flags | os.O_CLOEXEC))
        return f"/proc/self/fd/{self._fds[-1]}"
