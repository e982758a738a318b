"""Listener for the turns of a running trial, passed in a context variable.

Harbor makes the agent by name and writes its keyword arguments to disk, so a live object cannot be an argument.
"""

from contextvars import ContextVar
from typing import Protocol


class TurnListener(Protocol):
    """Receives every turn of a trial."""

    def on_prompt(self, text: str) -> None:
        """Receive the model's next prompt: first the task with the terminal, then new terminal output."""

    def on_answer(self, thinking: str | None, answer: str, *, cut: bool = False) -> None:
        """Receive the model's answer; `cut` at its length, it may not be whole."""


TURN_LISTENER: ContextVar[TurnListener | None] = ContextVar("TURN_LISTENER", default=None)
