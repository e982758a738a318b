"""The tasks of a family as the warm-up sees them, and which of them it may learn from.

Invariant: nothing that is held out becomes a demonstration. What is held out is read from the folder of held-out tasks,
and the hash of the instruction is the key, since that is all a policy is told.
"""

import hashlib
import random
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


def instruction_key(instruction: str) -> str:
    """What tells a task of a family from another."""
    return hashlib.sha256(instruction.strip().encode()).hexdigest()[:16]


def learnable[V: Variant](variants: Sequence[V], heldout: Path | None) -> list[V]:
    """The variants but for those whose instruction is in the folder `heldout`.

    Raises:
        UserError: No tasks are in the folder, or nothing is left to learn from.
    """
    keys = heldout_keys(heldout)
    left = [variant for variant in variants if instruction_key(variant.instruction) not in keys]
    if not left:
        raise UserError(
            "no task is left to learn from",
            where="warmup.family",
            do="let variants() give more than is held out",
        )
    return left


def heldout_keys(folder: Path | None) -> frozenset[str]:
    """Keys of the tasks in `folder`."""
    if folder is None:
        return frozenset()
    found = sorted(folder.glob("*/instruction.md"))
    if not found:
        raise UserError("no tasks here", where=str(folder), do="point warmup.heldout at a folder of Harbor tasks")
    return frozenset(instruction_key(path.read_text()) for path in found)
