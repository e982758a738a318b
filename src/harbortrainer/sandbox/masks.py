"""What of the host's root filesystem a sandbox sees: the plan of an overlay layer that hides everything else.

The rule is a list of what is shown, not of what is hidden: the system's own folders (`/usr`, `/bin`, `/lib*`, `/sbin`,
`/etc`, and of `/var` what package managers need). Everything else at the top is an empty folder. Of what is shown, a
file that not everybody on the host may read is hidden too, and some that everybody may read (`/etc/machine-id`, ...).

Invariant: a plan belongs to the listing it was made from. When the host's folders change, the next sandbox has another.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SHOWN = {
    "/": {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "var", "nix", "gnu"},
    "/var": {"lib", "cache", "local", "lock", "run"},
    "/var/lib": {"dpkg", "apt", "ucf", "misc", "python", "pacman", "rpm", "apk", "alternatives", "xml-core"},
    "/var/cache": {"ldconfig", "man", "fontconfig"},
}
_KERNEL_FOLDERS = {"proc", "sys", "dev"}
_WALKED = ("/etc", "/usr/local", "/var/lib/dpkg", "/var/lib/apt", "/var/cache/ldconfig")
_PRIVATE_AGE_S = 60.0
_HIDDEN_ETC = (
    *("machine-id", "environment", "fstab", "crypttab", "exports", "pip.conf", "npmrc", "netrc", "motd", "resolv.conf"),
    *("ssh", "docker", "containerd", "kubernetes", "rancher", "cni", "cloud", "wireguard", "openvpn", "letsencrypt"),
    *("NetworkManager", "systemd", "uv", "pip", "conda", "google-cloud", "boto", "boto.cfg", "aws", "azure"),
    *("sudoers.d", "cron.d", "krb5.keytab", "ppp", "salt", "puppet", "chef", "vault", "consul.d", "nomad.d"),
)
_MODES = {"/root": 0o700, "/tmp": 0o1777, "/var/tmp": 0o1777}
_FILES = {
    "/etc/hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost\n",
    "/etc/hostname": "sandbox\n",
    "/etc/shadow": "root:*:19000:0:99999:7:::\n",
    "/etc/gshadow": "root:*::\n",
}


def plan(rootfs: Path, *, hidden: tuple[Path, ...] = ()) -> dict[str, Any] | None:
    """The masking layer for a root filesystem, as data; None for one that is not the host's: nothing is masked there.

    Returns:
        `key`, and what the layer holds: `folders` [path, mode], `hidden` (folders that are shown empty), `files`
        {path: text}.

    Args:
        hidden: Folders that are hidden wherever they lie (the project's, the cache's).
    """
    if rootfs != Path("/"):
        return None
    masked = sorted({*_unlisted(), *_private(), *(str(path.resolve()) for path in hidden)})
    kept: list[str] = []
    for path in masked:  # sorted, so that a folder comes before what is in it
        if not any(path.startswith(above + "/") for above in kept):
            kept.append(path)
    made = {"hidden": [p for p in kept if _is_folder(p)], "folders": [], "files": {}}
    made["files"] = {path: "" for path in kept if _is_file(path)} | _FILES
    above = sorted({str(parent) for path in (*kept, *_FILES, *_MODES) for parent in Path(path).parents})
    made["folders"] = [[path, _mode(path)] for path in above] + [[path, mode] for path, mode in _MODES.items()]
    return made | {"key": hashlib.sha256(json.dumps(made).encode()).hexdigest()[:32]}


def _unlisted() -> Iterator[str]:
    for folder, shown in _SHOWN.items():
        for name in _names(folder):
            if name not in shown and not (folder == "/" and name in _KERNEL_FOLDERS):
                yield f"{folder.rstrip('/')}/{name}"


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 (called for every sandbox)
    except OSError:
        return []


_found: tuple[float, list[str]] = (0.0, [])


def _private() -> list[str]:
    """Files in what is shown that not everybody may read, and somebody's configuration. Looked up once a minute."""
    global _found
    when, paths = _found
    if not paths or time.monotonic() - when > _PRIVATE_AGE_S:
        paths = [f"/etc/{name}" for name in _HIDDEN_ETC]
        for top in _WALKED:
            paths += _unreadable(top)
        _found = (time.monotonic(), paths)
    return paths


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


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114


def _is_file(path: str) -> bool:
    return os.path.lexists(path) and not _is_folder(path) and not os.path.islink(path)  # noqa: PTH114


def _mode(path: str) -> int:
    try:
        return stat.S_IMODE(os.stat(path).st_mode)  # noqa: PTH116
    except OSError:
        return 0o755
