"""The sandbox's view of the filesystem. Called in the sandbox's own mount namespace; returns inside the new root.

Invariant: when `enter` has returned, no path, mount or descriptor of the host's is reachable except the overlays' lower
layers, through the overlays, and the binds that were asked for.
"""

import os
from typing import Any

from harbortrainer.sandbox.inside import kernel as k
from harbortrainer.sandbox.inside import kernelfs
from harbortrainer.sandbox.inside.tree import FLAGS, Tree

_BASE = "/tmp"  # any folder will do: it is hidden in this mount namespace only


def enter(spec: dict[str, Any], plan: dict[str, Any] | None, *, privileged: bool) -> int:
    """Build the filesystem that `spec` describes and make it the root. Returns a descriptor of a writable /proc."""
    k.mount("none", "/", None, k.MS_REC | k.MS_PRIVATE)
    tree = Tree(spec, plan, privileged=privileged)
    binds = [(os.open(bind["source"], os.O_PATH), bind) for bind in spec["binds"]]
    k.mount("tmpfs", _BASE, "tmpfs", FLAGS, f"size={spec['disk_mb']}m,nr_inodes={spec['inodes']},mode=755")
    root = tree.build(_BASE)
    proc = kernelfs.proc(root, _BASE)
    kernelfs.devices(root, _BASE)
    for fd, bind in binds:
        _bind(root, fd, bind)
    for path in spec["dirs"]:
        os.makedirs(inside(root, path), exist_ok=True)
        os.chmod(inside(root, path), 0o777)
    for path, text in spec["files"].items():
        _write(inside(root, path), text)
    k.change_root(root)
    return proc


def inside(root: str, path: str) -> str:
    """The path under the new root; a link on the way is replaced, so that nothing planted in a layer leads out."""
    joined = root
    for part in path.split("/"):
        if part in ("", ".", ".."):
            continue
        joined += "/" + part
        if os.path.islink(joined):
            os.unlink(joined)
    return joined


def _bind(root: str, fd: int, bind: dict[str, Any]) -> None:
    source, target = f"/proc/self/fd/{fd}", inside(root, bind["target"])
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        _write(target, "")
    k.bind(source, target, flags=FLAGS | (k.MS_RDONLY if bind.get("read_only") else 0))
    os.close(fd)


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
