"""Masking layers: overlay layers, in memory, that hide parts of a root filesystem.

They lie on a tmpfs of the nursery's own mount namespace: nobody else sees them, and they end with it.
"""

import os

from harbortrainer.sandbox.inside import kernel as k
from harbortrainer.sandbox.inside.messages import HostView

# A folder that exists wherever the kernel runs and that no task's files lie in.
_FOLDER = "/sys/kernel"


def prepare(*, privileged: bool) -> None:
    """Give this process a mount namespace with room for masks; an ordinary user becomes root in a user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    os.unshare(os.CLONE_NEWNS | (0 if privileged else os.CLONE_NEWUSER))
    if not privileged:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1\n"), ("gid_map", f"0 {gid} 1\n")):
            k.write(f"/proc/self/{name}", text)
    k.mount("none", "/", None, k.MS_REC | k.MS_PRIVATE)
    k.mount("tmpfs", _FOLDER, "tmpfs", k.MS_NOSUID | k.MS_NODEV, "mode=755")


def path_of(key: str) -> str:
    """Where the layer with that key lies, in the nursery's mount namespace and its copies."""
    return f"{_FOLDER}/{key}"


def build(view: HostView, *, privileged: bool) -> None:
    """Make the layer of a view."""
    top = path_of(view.key)
    for path, mode in view.modes.items():
        os.makedirs(top + path, exist_ok=True)
        os.chmod(top + path, mode)
    attribute = "trusted.overlay.opaque" if privileged else "user.overlay.opaque"
    for path in view.hidden:
        os.makedirs(top + path, exist_ok=True)
        os.setxattr(top + path, attribute, b"y")
    for path, text in view.files.items():
        os.makedirs(os.path.dirname(top + path), exist_ok=True)
        with open(top + path, "w") as file:
            file.write(text)
