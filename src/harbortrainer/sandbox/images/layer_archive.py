"""Unpack one layer of a saved image into a folder that an overlay can mount.

Contract: whiteouts become overlay's own marks. A removed file is a device 0/0; a folder that hides lower layers is
marked opaque. Devices and extended attributes are omitted, since they have no use in a sandbox.

Invariant: no archive can write, read or link anything outside the folder. Links are resolved with the folder as root,
and names with `..` are refused.
"""

import os
import shutil
import stat
import tarfile
from pathlib import Path
from typing import IO

from harbortrainer.sandbox.errors_and_changes import SandboxBuildError

_WHITEOUT, _WHITEOUT_META, _OPAQUE_MARK = ".wh.", ".wh..wh.", ".wh..wh..opq"
_MAX_LINKS = 40
_CHUNK = 1 << 20


def unpack(archive: IO[bytes], target: Path, *, privileged: bool) -> int:
    """Unpack one layer.

    Args:
        archive: A seekable tar archive, uncompressed or compressed with gzip, bzip2 or xz.
        target: An empty folder.
        privileged: Keep owners and set root's overlay marks. Else all files belong to this user, who can read and
            remove them.

    Returns:
        The bytes of its files.

    Raises:
        SandboxBuildError: It is not an archive, points outside the folder, or cannot be written.
    """
    folder = _LayerFolder(target, privileged=privileged)
    try:
        with tarfile.open(fileobj=archive, mode="r:*") as tar:
            for member in tar:
                folder.add(member, tar)
        folder.finish()
    except (OSError, tarfile.TarError, ValueError) as error:
        raise SandboxBuildError(f"a layer of the image cannot be unpacked: {error}") from error
    return folder.size


class _LayerFolder:
    """Target folder during unpacking. Overlay marks and folder modes are set last, after all members are known."""

    def __init__(self, root: Path, *, privileged: bool) -> None:
        self._root, self._privileged = root.resolve(), privileged
        self._opaque = "trusted.overlay.opaque" if privileged else "user.overlay.opaque"
        self._folders: dict[str, tarfile.TarInfo] = {}
        self._whiteouts: list[str] = []
        self._opaque_folders: list[str] = []
        self._resolved: dict[str, Path] = {"": self._root}
        """Resolved folder by name; cleared whenever an entry is replaced."""
        self.size = 0

    def add(self, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        """Write a member, or record a whiteout for `finish`."""
        folder, name = os.path.split("/".join(_parts(member.name)))
        if name == _OPAQUE_MARK:
            self._opaque_folders.append(folder)
        elif name.startswith(_WHITEOUT):
            if not name.startswith(_WHITEOUT_META):
                self._whiteouts.append("/".join(_parts(f"{folder}/{name.removeprefix(_WHITEOUT)}")))
        elif member.isdir():
            self._folders[member.name] = member
            self._make_folder(self._resolve(member.name))
        elif not member.isdev() or member.isfifo():
            self._write(member, self._resolve(member.name), tar)

    def finish(self) -> None:
        """Apply whiteouts, opaque marks and folder modes. Paths are resolved again, since entries may have changed."""
        for name in self._whiteouts:
            path = self._resolve(name)
            if not os.path.lexists(path):
                os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
            elif is_folder(path):  # removed below and created again in this layer
                self._opaque_folders.append(name)
        for name in self._opaque_folders:
            path = self._resolve(name)
            self._make_folder(path)
            os.setxattr(path, self._opaque, b"y", follow_symlinks=False)
        for name, member in reversed(self._folders.items()):
            if is_folder(path := self._resolve(name)):
                self._set_metadata(path, member)

    def _write(self, member: tarfile.TarInfo, path: Path, tar: tarfile.TarFile) -> None:
        self._clear(path)
        if member.islnk():
            os.link(self._resolve(member.linkname), path, follow_symlinks=False)
            return
        if member.issym():
            path.symlink_to(member.linkname)
        elif member.isfifo():
            os.mkfifo(path)
        else:
            self._write_content(member, path, tar)
        self._set_metadata(path, member)

    def _write_content(self, member: tarfile.TarInfo, path: Path, tar: tarfile.TarFile) -> None:
        content = tar.extractfile(member)
        if content is None:
            raise ValueError(f"{member.name!r} has an unsupported type")
        with path.open("xb") as file:
            shutil.copyfileobj(content, file, _CHUNK)
        self.size += member.size

    def _set_metadata(self, path: Path, member: tarfile.TarInfo) -> None:
        """Set owner, mode and time."""
        if self._privileged:
            os.chown(path, member.uid, member.gid, follow_symlinks=False)
        if not member.issym():
            needed = stat.S_IRWXU if member.isdir() and not self._privileged else 0
            path.chmod(stat.S_IMODE(member.mode) | needed)
        os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)

    def _make_folder(self, path: Path) -> None:
        """Create a folder with mode 755, whatever this process's umask is."""
        if not is_folder(path):
            self._clear(path)
            path.mkdir()
            path.chmod(0o755)

    def _clear(self, path: Path) -> None:
        if os.path.lexists(path):
            self._resolved = {"": self._root}
            path.rmdir() if is_folder(path) else path.unlink()

    def _resolve(self, name: str) -> Path:
        """Return the path of a name, with its parent folders created. A link at its end is not followed."""
        *parts, last = _parts(name) or [""]
        folder = "/".join(parts)
        if folder not in self._resolved:
            self._resolved[folder] = self._follow_links(parts)
        return self._resolved[folder] / last

    def _follow_links(self, parts: list[str]) -> Path:
        resolved: list[str] = []
        left, links = parts[::-1], 0
        while left:
            part = left.pop()
            path = self._root.joinpath(*resolved, part)
            if part == "..":
                del resolved[-1:]
            elif path.is_symlink():
                links += 1
                if links > _MAX_LINKS:
                    raise ValueError(f"{'/'.join(parts)!r} has a loop of links")
                target = str(path.readlink())
                if target.startswith("/"):
                    resolved.clear()
                left += [step for step in reversed(target.split("/")) if step not in ("", ".")]
            else:
                self._make_folder(path)
                resolved.append(part)
        return self._root.joinpath(*resolved)


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"{name!r} points outside the archive")
    return parts


def is_folder(path: Path) -> bool:
    """Return whether it is a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()
