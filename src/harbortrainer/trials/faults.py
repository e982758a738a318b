"""Exceptions of our agents: the end of a run at a limit, and failures whose type determines the outcome."""

from harbortrainer.trials.outcome import Outcome


class RolloutEnd(Exception):  # noqa: N818 - an end, not an error
    """The agent has reached a limit; the state it left is graded.

    Args:
        ending: The limit, or `completed` if something else ended the rollout.
        message: Message for the log.
    """

    def __init__(self, ending: Outcome, message: str = "") -> None:
        self.ending = ending
        super().__init__(message or ending.value)


class ModelServerError(RuntimeError):
    """The model server is down, answers with an error, or answers with an invalid completion."""


class TokensMissingError(ModelServerError):
    """Requested token ids or log-probabilities are missing or invalid."""


class SandboxTimeoutError(RuntimeError):
    """A command that manages the terminal timed out."""
