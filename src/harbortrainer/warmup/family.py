"""A family of generated tasks: a Python file whose `variants()` are tasks, solved and mistaken.

Invariant: nothing that is held out becomes a transcript. What is held out is read from the folder of held-out tasks,
and the instruction is the key, since that is all a policy is told.
"""

import hashlib
import importlib.util
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from harbortrainer.errors import UserError


class Variant(Protocol):
    """One task of a family."""

    @property
    def name(self) -> str:
        """Unique in the family."""
        ...

    @property
    def instruction(self) -> str:
        """What instruction.md holds."""
        ...

    @property
    def commands(self) -> list[str]:
        """The solution: shell commands that print nothing."""
        ...

    def mistake(self, rng: random.Random) -> list[str]:
        """Commands that do not solve the task."""
        ...

    def write(self, folder: Path) -> Path:
        """Write the task in Harbor's format to `folder/<name>`."""
        ...


def task_key(instruction: str) -> str:
    """What tells a task of a family from another."""
    return hashlib.sha256(instruction.strip().encode()).hexdigest()[:16]


def learnable(file: Path, heldout: Path | None) -> list[Variant]:
    """The variants of the family in `file` but for those whose instruction is in the folder `heldout`.

    Raises:
        UserError: The file cannot be read as a family, or nothing is left to learn from.
    """
    keys = heldout_keys(heldout)
    left = [variant for variant in _load(file) if task_key(variant.instruction) not in keys]
    if not left:
        raise UserError(
            "no task is left to learn from", where=str(file), do="let variants() give more than is held out"
        )
    return left


def heldout_keys(folder: Path | None) -> frozenset[str]:
    """Keys of the tasks in `folder`."""
    if folder is None:
        return frozenset()
    found = sorted(folder.glob("*/instruction.md"))
    if not found:
        raise UserError("no tasks here", where=str(folder), do="point warmup.heldout at a folder of Harbor tasks")
    return frozenset(task_key(path.read_text()) for path in found)


def _load(file: Path) -> Sequence[Variant]:
    if not file.is_file():
        raise UserError("no such file", where=str(file), do="point warmup.family at a Python file with variants()")
    name = f"harbortrainer_family_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    if not hasattr(module, "variants"):
        raise UserError("no variants() in it", where=str(file), do="define variants() -> list of tasks")
    return module.variants()
