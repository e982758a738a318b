"""Mask layers: overlay layers in memory that hide parts of the host's root filesystem.

They are stored on a tmpfs in the fork server's own mount namespace. No other process sees them, and they disappear with
it.
"""

import os

from harbortrainer.sandbox.inside import syscalls as k
from harbortrainer.sandbox.inside.messages import HostView

# A folder that every Linux machine has and that no task uses.
_FOLDER = "/sys/kernel"


def enter_namespace(*, privileged: bool) -> None:
    """Enter a mount namespace with a tmpfs for mask layers; unprivileged, also become root of a user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    os.unshare(os.CLONE_NEWNS | (0 if privileged else os.CLONE_NEWUSER))
    if not privileged:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1\n"), ("gid_map", f"0 {gid} 1\n")):
            k.write(f"/proc/self/{name}", text)
    k.mount("none", "/", None, k.MS_REC | k.MS_PRIVATE)
    k.mount("tmpfs", _FOLDER, "tmpfs", k.MS_NOSUID | k.MS_NODEV, "mode=755")


def layer_path(key: str) -> str:
    """Return the folder of the layer with this key, in the fork server's mount namespace and its copies."""
    return f"{_FOLDER}/{key}"


def build(view: HostView, *, privileged: bool) -> None:
    """Build the mask layer of a view."""
    top = layer_path(view.key)
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
