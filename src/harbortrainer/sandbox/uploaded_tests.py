"""What was put into a sandbox for grading, and whether it is still there as it was put.

A process that the agent left running may take the tests away, replace them, or put something else in their place,
again and again. An environment that grades where the agent worked asks after each command of the verifier's that
has given no reward; when the answer is no, it kills what the agent left, uploads once more and repeats the command.
"""

import tarfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import IO

type Uploads = Sequence[tuple[Path, str]]
"""Folders of the host's, and where they went, in order."""

_MOST_FILES = 20


def files_of(uploads: Uploads) -> dict[str, Path]:
    """Path inside to file of the host's, for at most twenty files; where two went to one path, the later one."""
    files: dict[str, Path] = {}
    for folder, target in uploads:
        for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
            if path.is_file():
                files[f"{target.rstrip('/')}/{path.relative_to(folder).as_posix()}"] = path
    return dict(list(files.items())[:_MOST_FILES])


def size_of(uploads: Uploads) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for folder, _ in uploads for path in folder.rglob("*") if path.is_file())


async def changed(uploads: Uploads, read: Callable[[str], Awaitable[bytes | None]]) -> list[str]:
    """Which of the files that were uploaded are not as they were put, in words.

    Args:
        uploads: What was uploaded.
        read: Reads a file in the sandbox; None when it cannot.
    """
    found = []
    for inside, path in files_of(uploads).items():
        content = await read(inside)
        if content != path.read_bytes():
            found.append(f"{inside} was {'removed' if content is None else 'changed'} while it was graded")
    return found


def is_whole(archive: IO[bytes], target: str, uploads: Uploads) -> bool:
    """Whether an archive of the folder `target`, its name in front of each member's, holds every file as it was put."""
    files = files_of([(folder, to) for folder, to in uploads if to == target])
    prefix = Path(target).name
    wanted = {f"{prefix}/{Path(inside).relative_to(target).as_posix()}": path for inside, path in files.items()}
    try:
        with tarfile.open(fileobj=archive, mode="r|") as tar:
            for member in tar:
                path = wanted.pop(member.name, None)
                if path is None:
                    continue
                content = tar.extractfile(member) if member.isreg() else None
                if content is None or content.read() != path.read_bytes():
                    return False
    except tarfile.TarError:
        return False
    return not wanted
