"""The tasks of a family, and the ones that a warm-up may learn from.

Invariant: no held-out task becomes a demonstration. The folder of held-out tasks lists them; the key of a task is the
hash of its instruction, the only text that a policy receives.
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
        """Content of instruction.md."""
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
    """Return the key of a task."""
    return hashlib.sha256(instruction.strip().encode()).hexdigest()[:16]


def learnable[V: Variant](variants: Sequence[V], heldout: Path | None) -> list[V]:
    """Return the variants without those whose instruction is in the folder `heldout`.

    Raises:
        UserError: The folder has no tasks, or no variant is left.
    """
    keys = heldout_keys(heldout)
    left = [variant for variant in variants if instruction_key(variant.instruction) not in keys]
    if not left:
        raise UserError(
            "all tasks are held out",
            where="warmup.family",
            do="let variants() return more tasks than are held out",
        )
    return left


def heldout_keys(folder: Path | None) -> frozenset[str]:
    """Return the keys of the tasks in `folder`."""
    if folder is None:
        return frozenset()
    found = sorted(folder.glob("*/instruction.md"))
    if not found:
        raise UserError("no tasks here", where=str(folder), do="point warmup.heldout at a folder of Harbor tasks")
    return frozenset(instruction_key(path.read_text()) for path in found)
