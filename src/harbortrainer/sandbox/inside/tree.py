"""The sandbox's root folder, put together from the root filesystem, the task's layer and room for changes.

Of the host's own root filesystem only the shown folders appear, each under an overlay of its own; everything else is an
empty folder in memory. Another root filesystem appears as a whole, under one overlay.

Invariant: every change lands below `base`: in memory, or in the layer that is being built.
"""

import os
from typing import Any

from harbortrainer.sandbox.inside import copying, masking
from harbortrainer.sandbox.inside import kernel as k

FLAGS = k.MS_NOSUID | k.MS_NODEV


class Tree:
    """Assembles the root. Opens every path of the host's before the mounts that will hide them.

    A layer is a folder with `root` (files outside the shown folders) and `over/NAME` (changes to a shown folder, its
    slashes written as `%`); a layer that is built is left in the same form.
    """

    def __init__(self, spec: dict[str, Any], plan: dict[str, Any] | None, *, privileged: bool) -> None:
        self._plan, self._options = plan, "xino=off" if privileged else "xino=off,userxattr"
        self._fds: list[int] = []
        self._layer = self._open(spec["layer"]) if spec["layer"] else None
        self._copied = self._layer if spec["small"] else None
        self._target = self._open(spec["upper"]) if spec["upper"] else None
        self._whole = self._open(spec["rootfs"]) if plan is None else None
        self._shown = {path: self._open(path) for path in plan["shown"]} if plan else {}
        self._plain = {path: self._open(path, os.O_RDONLY) for path in plan["plain"]} if plan else {}

    def build(self, base: str) -> str:
        """Put the root together in `base`, an empty tmpfs. Returns where it is mounted."""
        top, root = base if self._target is None else self._path(self._target), f"{base}/root"
        for path in (root, f"{top}/upper", f"{top}/upper/over", f"{top}/upper/root", f"{top}/work"):
            os.makedirs(path, exist_ok=True)
        if self._copied is not None:
            for name in ("root", "over"):
                if os.path.isdir(f"{self._path(self._copied)}/{name}"):
                    copying.copy_tree(f"{self._path(self._copied)}/{name}", f"{top}/upper/{name}")
        self._root(top, root)
        for path, fd in self._shown.items():
            name = path.strip("/").replace("/", "%")
            os.makedirs(root + path, exist_ok=True)
            lowers = [*self._layers(f"over/{name}"), *self._masks(path), self._path(fd)]
            self._overlay(lowers, f"{top}/upper/over/{name}", f"{top}/work/{name}", root + path)
        for fd in self._fds:
            os.close(fd)
        return root

    def _root(self, top: str, root: str) -> None:
        lowers = self._layers("root") if self._whole is None else [*self._layers("root"), self._path(self._whole)]
        if lowers:
            self._overlay(lowers, f"{top}/upper/root", f"{top}/work/root", root)
        else:
            k.bind(f"{top}/upper/root", root)
        if self._plan is None:
            return
        for path, mode in self._plan["folders"]:
            if not os.path.isdir(root + path):
                os.makedirs(root + path, exist_ok=True)
                os.chmod(root + path, mode)
        for path, target in self._plan["links"].items():
            if not os.path.lexists(root + path):
                os.symlink(target, root + path)
        for path, fd in self._plain.items():
            if not os.path.lexists(root + path):
                copying.copy_file(self._path(fd), root + path)

    def _overlay(self, lowers: list[str], upper: str, work: str, target: str) -> None:
        for path in (upper, work):
            os.makedirs(path, exist_ok=True)
        options = f"lowerdir={':'.join(lowers)},upperdir={upper},workdir={work},{self._options}"
        k.mount("overlay", target, "overlay", FLAGS, options)

    def _layers(self, name: str) -> list[str]:
        if self._layer is None or self._copied is not None:
            return []
        path = f"{self._path(self._layer)}/{name}"
        return [path] if os.path.isdir(path) else []

    def _masks(self, path: str) -> list[str]:
        assert self._plan is not None
        mask = masking.path_of(self._plan["key"]) + path
        return [mask] if os.path.isdir(mask) else []

    def _open(self, path: str, flags: int = os.O_PATH | os.O_DIRECTORY) -> int:
        self._fds.append(os.open(path, flags | os.O_CLOEXEC))
        return self._fds[-1]

    @staticmethod
    def _path(fd: int) -> str:
        return f"/proc/self/fd/{fd}"
