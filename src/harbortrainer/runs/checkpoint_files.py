"""Whether a checkpoint is whole: a list of its files with their sizes and hashes, written with it and held against it.

Invariant: a checkpoint of which a single byte is missing or another is not taken for a good one.
"""

import hashlib
import json
from pathlib import Path

LIST = "files.json"


def list_files(folder: Path) -> None:
    """Write down what lies in a folder."""
    files = {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != LIST}
    (folder / LIST).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None when it is as it was written. Older ones have no list."""
    if not (folder / LIST).exists():
        return None if (folder / "progress.json").exists() else f"{LIST} is missing"
    try:
        files = dict(json.loads((folder / LIST).read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return f"{LIST} cannot be read"
    for name, digest in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _digest(folder / name) != digest:
            return f"{name} is not as it was written"
    return None


def _digest(path: Path) -> list[object]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]
