"""The folder that a Dockerfile copies from: its content's hash, and archives of parts of it.

Invariant: nothing outside the folder is ever read, whatever a COPY or a link in the folder says.
"""

import glob
import hashlib
import os
import stat
from functools import lru_cache
from pathlib import Path

from harbortrainer.sandbox.sandbox_errors import SandboxBuildError


def digest(folder: Path) -> str:
    """A hash of names, modes and contents. Files are read again only when their size or time has changed."""
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        sha.update(f"{path.relative_to(folder)}\0{info.st_mode:o}\0".encode())
        if stat.S_ISLNK(info.st_mode):
            sha.update(str(path.readlink()).encode())
        elif stat.S_ISREG(info.st_mode):
            sha.update(_content(str(path), info.st_size, info.st_mtime_ns, info.st_ino))
    return sha.hexdigest()


@lru_cache(maxsize=65536)
def _content(path: str, size: int, mtime_ns: int, inode: int) -> bytes:
    del size, mtime_ns, inode  # only there to make another key
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def sources(folder: Path, patterns: list[str]) -> list[Path]:
    """The files and folders of the context that a COPY names; SandboxBuildError when one matches nothing."""
    found: list[Path] = []
    for pattern in patterns:
        clean = os.path.normpath("/" + pattern).lstrip("/")
        names = glob.glob(clean or ".", root_dir=folder, include_hidden=True)  # noqa: PTH207 (`**` is `*` here)
        matches = sorted(folder / name for name in names)
        if not matches:
            raise SandboxBuildError(f"COPY: {pattern!r} is not in the task's environment folder")
        found += matches
    for path in found:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise SandboxBuildError(f"COPY: {path.relative_to(folder)} leads out of the task's environment folder")
    return found
