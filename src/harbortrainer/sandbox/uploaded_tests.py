"""Detects changes to the files that were uploaded into a sandbox for grading.

A process that the agent left running can remove or replace the tests again and again. So an environment that grades in
the agent's sandbox checks the uploads after each verifier command that gave no reward. If they have changed, it kills
the leftover processes, uploads again and repeats the command. If they change again, the verifier edits them itself.
"""

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

type Uploads = Sequence[tuple[Path, str]]
"""Uploaded host folders and their targets, in order."""

_MAX_FILES = 20


def uploaded_files(uploads: Uploads) -> dict[str, Path]:
    """Map paths inside to regular host files, the last twenty; the later upload to a path wins."""
    files: dict[str, Path] = {}
    for folder, target in uploads:
        for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
            if path.is_file() and not path.is_symlink():
                files[f"{target.rstrip('/')}/{path.relative_to(folder).as_posix()}"] = path
    return dict(list(files.items())[-_MAX_FILES:])


def upload_size(uploads: Uploads) -> int:
    """Return the size of all uploaded files in bytes."""
    return sum(path.stat().st_size for folder, _ in uploads for path in folder.rglob("*") if path.is_file())


def is_intact(archive: IO[bytes], target: str, uploads: Uploads) -> bool:
    """Whether an archive of the folder `target` holds every uploaded file unchanged.

    The names in the archive begin with the folder's name.
    """
    files = uploaded_files([(folder, to) for folder, to in uploads if to == target])
    prefix = Path(target).name
    wanted = {f"{prefix}/{Path(inside).relative_to(target).as_posix()}": path for inside, path in files.items()}
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            for member in tar:
                path = wanted.pop(member.name, None)
                if path is None:
                    continue
                # Files with one inode on the host are hard links in the archive.
                content = tar.extractfile(member) if member.isreg() or member.islnk() else None
                if content is None or content.read() != path.read_bytes():
                    return False
    except (tarfile.TarError, KeyError):  # KeyError: a hard link to a file outside the archive
        return False
    return not wanted
