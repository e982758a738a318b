"""Hash of a folder's content, which identifies a task wherever it lies.

Invariant: equal files with equal relative paths have equal keys. The folder is untrusted: its depth and its size are
limited, and links are hashed by their target, never followed.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from harbortrainer.errors import UserError

MAX_DEPTH = 200
"""Most folders inside each other."""
HASHED_AT_ONCE = 1 << 20
MAX_FOLDER_BYTES = 64 << 30
"""Most bytes of one task."""


def content_key(
    folder: Path,
    check_link: Callable[[str], None] = lambda path: None,
    check_file: Callable[[str, bytes], None] = lambda name, data: None,
) -> str:
    """Hash of every file below `folder`: its relative path, executable bit (or link target) and bytes.

    Args:
        folder: The folder.
        check_link: Called with the path of each link.
        check_file: Called with the relative path of each file that is not empty, and with its first bytes.
    """
    digest, left = hashlib.sha256(), MAX_FOLDER_BYTES
    for name, entry in sorted(_files(os.fspath(folder))):
        if entry.is_symlink():
            check_link(entry.path)
            digest.update(f"link\0{name}\0{os.readlink(entry.path)}\0".encode())  # noqa: PTH115 - see _files
            continue
        status = entry.stat()
        left -= status.st_size
        if left < 0:
            do = "remove large files"
            raise UserError(f"larger than {MAX_FOLDER_BYTES >> 30} GB", where=str(folder), do=do)
        executable = bool(status.st_mode & 0o100)
        digest.update(f"file\0{name}\0{int(executable)}\0{status.st_size}\0".encode())
        handle = os.open(entry.path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if data := os.read(handle, min(status.st_size, HASHED_AT_ONCE)):
                check_file(name, data)
            while data:
                digest.update(data)
                data = os.read(handle, HASHED_AT_ONCE) if status.st_size > HASHED_AT_ONCE else b""
        finally:
            os.close(handle)
    return digest.hexdigest()


def _files(folder: str, above: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield every file and link below `folder` with its relative path.

    pathlib takes seven times as long, which is seconds for some thousand tasks.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink() or entry.is_file(follow_symlinks=False):
                yield above + entry.name, entry
            elif entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__":
                if above.count("/") >= MAX_DEPTH:
                    do = "remove the inner ones"
                    raise UserError(f"folders are nested more than {MAX_DEPTH} deep", where=folder[:200], do=do)
                yield from _files(entry.path, f"{above}{entry.name}/")
