"""The part of the host's root filesystem that a sandbox sees, as data for `inside.filesystem` and `inside.mask_layers`.

The view is an allow list: `/usr`, `/bin`, `/lib*`, `/sbin`, `/etc` and the parts of `/var` that package managers need.
Within it, files that are not world-readable are hidden, and some that are (`/etc/machine-id`, `/etc/ssh`, ...).

Invariant: nothing outside the listed folders is reachable, whatever is added to the host later.
"""

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from harbortrainer.sandbox.inside.messages import NAME_FILES, HostView, encode

_SHOWN = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/nix", "/gnu"),
    *("/var/lib/dpkg", "/var/lib/apt", "/var/lib/pacman", "/var/lib/rpm"),
)
_SCANNED = ("/etc", "/usr/local", "/var/lib/dpkg", "/var/lib/apt")
_MAX_AGE_S = 60.0
_HIDDEN_ETC = (
    *("machine-id", "environment", "fstab", "crypttab", "exports", "pip.conf", "npmrc", "netrc", "motd", "resolv.conf"),
    *("ssh", "docker", "containerd", "kubernetes", "rancher", "cni", "cloud", "wireguard", "openvpn", "letsencrypt"),
    *("NetworkManager", "systemd", "uv", "pip", "conda", "google-cloud", "boto", "boto.cfg", "aws", "azure"),
    *("sudoers.d", "cron.d", "krb5.keytab", "ppp", "salt", "puppet", "chef", "vault", "consul.d", "nomad.d"),
)
_FOLDERS = {
    **dict.fromkeys(("/boot", "/home", "/media", "/mnt", "/opt", "/run", "/run/lock", "/srv", "/var"), 0o755),
    **dict.fromkeys(("/var/cache", "/var/lib", "/var/log", "/var/spool", "/var/mail", "/var/lib/misc"), 0o755),
    **dict.fromkeys(("/var/cache/apt", "/var/cache/apt/archives", "/var/cache/apt/archives/partial"), 0o755),
    **{"/root": 0o700, "/tmp": 0o1777, "/var/tmp": 0o1777},
}
_LINKS = {"/var/run": "/run", "/var/lock": "/run/lock"}
_FILES = {
    **NAME_FILES,
    "/etc/shadow": "root:*:19000:0:99999:7:::\n",
    "/etc/gshadow": "root:*::\n",
}
_cached_view: tuple[float, tuple[Path, ...], HostView | None] = (0.0, (), None)


def view_of(rootfs: Path, *, hidden: tuple[Path, ...] = ()) -> HostView | None:
    """Return the view of the host's root filesystem; None for another one, which is not masked.

    Args:
        hidden: Folders to hide wherever they are, such as the project's and the cache's.
    """
    global _cached_view
    if rootfs != Path("/"):
        return None
    built_at, cached_hidden, cached = _cached_view
    if cached is None or cached_hidden != hidden or time.monotonic() - built_at > _MAX_AGE_S:
        cached = _view(hidden)
        _cached_view = (time.monotonic(), hidden, cached)
    return cached


def _view(hidden: tuple[Path, ...]) -> HostView:
    links = {path: str(Path(path).readlink()) for path in _SHOWN if Path(path).is_symlink()} | _LINKS
    shown, plain, split_links = _split([path for path in _SHOWN if Path(path).is_dir() and path not in links])
    masked = sorted({*(f"/etc/{name}" for name in _HIDDEN_ETC), *_private(), *(str(p.resolve()) for p in hidden)})
    kept: list[str] = []
    for path in masked:  # sorted, so that a folder comes before what is in it
        if _is_inside(path, shown) and not _is_inside(path, kept) and _exists(path):
            kept.append(path)
    folders = [path for path in kept if Path(path).is_dir()]
    around = {str(parent) for path in (*shown, *plain, *split_links) for parent in Path(path).parents} - {"/"}
    above = sorted({str(parent) for path in (*kept, *_FILES) for parent in Path(path).parents})
    view = HostView(
        shown=shown,
        plain=[path for path in plain if path not in masked],
        links=links | {path: target for path, target in split_links.items() if path not in masked},
        folders=dict(sorted((dict.fromkeys(around, 0o755) | _FOLDERS).items())),
        hidden=folders,
        files={path: "" for path in kept if path not in folders} | _FILES,
        modes={path: _mode(path) for path in above},
    )
    return replace(view, key=hashlib.sha256(encode(view)).hexdigest()[:32])


def _is_inside(path: str, tops: list[str]) -> bool:
    return any(path.startswith(top + "/") or path == top for top in tops)


def _split(folders: list[str]) -> tuple[list[str], list[str], dict[str, str]]:
    """Split folders that contain a mount point, which an overlay would not show, into folders, plain files and links.

    Other files, such as sockets, are left out.
    """
    mounted = _mounted_below()
    shown, plain, links = [], [], {}
    while folders:
        folder = folders.pop()
        if not any(point.startswith(folder + "/") for point in mounted):
            shown.append(folder)
            continue
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif entry.is_symlink():
                links[entry.path] = str(Path(entry.path).readlink())
            elif entry.is_file():
                plain.append(entry.path)
    return sorted(shown), sorted(plain), dict(sorted(links.items()))


def _mounted_below() -> list[str]:
    """Return mount points: folders, and for an ordinary user also files, which the kernel does not let it uncover."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if os.geteuid() != 0 or Path(point).is_dir()]


def _private() -> list[str]:
    return [path for top in _SCANNED for path in _unreadable(top)]


def _unreadable(top: str) -> Iterator[str]:
    try:
        entries = list(os.scandir(top))
    except OSError:
        return
    for entry in entries:
        if entry.is_symlink():
            continue
        mode = entry.stat(follow_symlinks=False).st_mode
        if not mode & stat.S_IROTH:
            if entry.path not in _FILES:
                yield entry.path
        elif stat.S_ISDIR(mode):
            yield from _unreadable(entry.path)


def _exists(path: str) -> bool:
    return os.path.lexists(path) and not Path(path).is_symlink()


def _mode(path: str) -> int:
    try:
        return stat.S_IMODE(Path(path).stat().st_mode)
    except OSError:
        return 0o755
