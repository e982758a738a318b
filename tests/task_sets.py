"""Task sets for tests: git repositories, Harbor registries, parquet files, hub datasets."""

import io
import json
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq


def make_task(folder: Path, instruction: str = "Do it.") -> Path:
    """Write a small task that is never run."""
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text('version = "1.0"\n')
    (folder / "instruction.md").write_text(instruction)
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    return folder


def git(folder: Path, *words: str) -> str:
    """Run git in a folder and return its output."""
    who = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path) -> str:
    """Make a folder a repository with one commit, and return the commit."""
    if not (folder / ".git").exists():
        git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "tasks")
    return git(folder, "rev-parse", "HEAD")


def bare(folder: Path, at: Path) -> str:
    """Make a bare copy of a repository and return its URL."""
    git(folder, "clone", "-q", "--bare", str(folder), str(at))
    return f"file://{at}"


def packed(folder: Path, mode: Literal["w:gz", "w"] = "w:gz") -> bytes:
    """Pack a folder as public task sets do: relative names, including folders."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, arcname=path.relative_to(folder).as_posix(), recursive=False)
    return buffer.getvalue()


def write_parquet(
    file: Path, rows: Mapping[str, bytes | None], names: tuple[str, str] = ("path", "task_binary")
) -> Path:
    """Write rows of name and archive to a parquet file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = [pa.array(list(rows), pa.string()), pa.array(list(rows.values()), pa.binary())]
    pq.write_table(pa.table(columns, names=list(names)), file)
    return file


def write_registry(file: Path, tasks: list[dict[str, str]], name: str = "own-set", version: str = "1.0") -> Path:
    """Write a Harbor registry file with one dataset."""
    dataset = {"name": name, "version": version, "description": "ours", "tasks": tasks}
    file.write_text(json.dumps([dataset]))
    return file
