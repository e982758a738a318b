"""What a run is made of beside its config: the policy's files, the tasks, the packages that compute.

It is written down when the run starts, in `made_of.json`, and compared at `--resume`: the same name may stand for
something else by then. Other weights or other tasks are another run, and are refused; other packages are told.
Invariant: a fingerprint depends on contents alone, never on times or places.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ValidationError

from harbortrainer.errors import UserError
from harbortrainer.runs.durable import write_whole

FILE = "made_of.json"
PACKAGES = ("harbortrainer", "harbor", "verifiers", "torch", "transformers", "peft")
DECIDING = {".safetensors", ".bin", ".pt", ".json", ".jinja", ".model", ".txt"}
"""Endings of a model folder's files that decide what it computes and what it is told."""
WHOLE_MB, BLOCKS, BLOCK = 64, 64, 1 << 16
"""Files up to so many MB are read whole; of larger ones beginning, end and so many blocks between, each so long."""


class TaskOrigin(BaseModel):
    """Where the tasks of a source came from."""

    source: str
    """A folder, or a source that is pinned."""
    left_out: list[str] = []
    """The tasks that `skip_bad` left out, and why."""


class Ingredients(BaseModel):
    """What a run is made of."""

    weights: dict[str, str] = {}
    """Fingerprint of each file of the policy that the run started from."""
    tasks: dict[str, dict[str, str]] = {}
    """Content key of each task, by source and name."""
    origins: dict[str, TaskOrigin] = {}
    """Where these tasks came from, by source."""
    packages: dict[str, str] = {}
    """Releases."""


def ingredients(
    model: str, tasks: Mapping[str, Mapping[str, str]], origins: Mapping[str, TaskOrigin] | None = None
) -> Ingredients:
    """What a run is made of now.

    Args:
        model: The policy's folder, or its hub id.
        tasks: Content keys by source and name of the task.
        origins: Where they came from, by source.
    """
    return Ingredients(
        weights=weights_of(model),
        tasks={name: dict(own) for name, own in tasks.items()},
        origins=dict(origins or {}),
        packages=releases(),
    )


def releases() -> dict[str, str]:
    """The installed releases of what a run computes with."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def weights_of(model: str) -> dict[str, str]:
    """A fingerprint of each file of a model; of one on the hub the commit that its cache holds."""
    folder = Path(model)
    if not folder.is_dir():
        commits = hub_folder(model) / "refs" / "main"
        return {"commit": commits.read_text(encoding="utf-8").strip()} if commits.is_file() else {}
    files = sorted(path for path in folder.iterdir() if path.suffix in DECIDING and path.is_file())
    return {path.name: fingerprint(path) for path in files}


def hub_folder(model: str) -> Path:
    """Where the hub's cache keeps a model (`refs/`, `snapshots/`), whether it does or not; huggingface_hub's rule."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    return Path(cache).expanduser() / f"models--{model.replace('/', '--')}"


def fingerprint(path: Path) -> str:
    """A hash of a file's size and contents; of a large file, of blocks spread evenly over it."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_MB << 20:
            hashlib.file_digest(file, lambda: digest)
        else:
            _blocks(file, size, digest.update)
    return digest.hexdigest()[:32]


def _blocks(file: BinaryIO, size: int, update: Callable[[bytes], object]) -> None:
    for number in range(BLOCKS + 1):
        file.seek((size - BLOCK) * number // BLOCKS)
        update(file.read(BLOCK))


def check_ingredients(folder: Path, now: Ingredients, *, resume: bool) -> list[str]:
    """Write down what a run starts with, or compare what it goes on with.

    Returns:
        What is worth a line: packages of another release than before.

    Raises:
        UserError: The weights or the tasks are others.
    """
    path = folder / FILE
    before = _read(path) if resume else None
    notes = []
    if before is not None:
        _refuse(path, "the policy's files", first_change(before.weights, now.weights))
        for source in before.tasks.keys() | now.tasks.keys():
            change = first_change(before.tasks.get(source, {}), now.tasks.get(source, {}))
            _refuse(path, f"the tasks of source {source!r}", change)
        notes = package_notes(before.packages, now.packages)
    if before != now:
        write_whole(path, now.model_dump_json(indent=2) + os.linesep)
    return notes


def first_change(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The first name whose fingerprint differs, in words; None when all are equal."""
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            return f"{name} is {'new' if name not in before else 'gone' if name not in now else 'another'}"
    return None


def package_notes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line about packages that have changed; none when none has."""
    changes = [
        f"{name} {before.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    return [f"warning: other releases than when this run was last started: {', '.join(changes)}"] if changes else []


def _refuse(path: Path, what: str, change: str | None) -> None:
    if change is not None:
        raise UserError(
            f"{what} have changed since this run was started: {change}",
            where=str(path),
            do="put them back as they were, or start a run of another run.name",
        )


def _read(path: Path) -> Ingredients | None:
    """What stands there; None in a folder of a release that wrote none."""
    try:
        return Ingredients.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, ValidationError) as error:
        raise UserError("cannot be read", where=str(path), do="put it back, or remove it to go on without") from error
