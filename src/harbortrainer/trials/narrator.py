"""Who is told of the turns of a trial while it runs.

A variable of the context in which the trial runs: Harbor makes the agent by name and writes its keyword arguments to
disk, so nothing alive can be handed to it.
"""

from contextvars import ContextVar
from typing import Protocol


class Narrator(Protocol):
    """Is told of every turn."""

    def shown(self, text: str) -> None:
        """What the model is shown next: its prompt with the terminal, then what the terminal says."""

    def said(self, thinking: str | None, answer: str) -> None:
        """What the model answered."""


NARRATOR: ContextVar[Narrator | None] = ContextVar("NARRATOR", default=None)
