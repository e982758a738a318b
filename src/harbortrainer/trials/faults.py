"""What the agent raises: its own end at a limit, and failures with a name that tells who is to blame."""

from harbortrainer.trials.outcome import Outcome


class RolloutEnd(Exception):  # noqa: N818 - an end, not an error
    """The agent has reached a limit; what it left is graded.

    Args:
        ending: The limit, or `completed` when somebody else decided to end the rollout.
        message: For the log.
    """

    def __init__(self, ending: Outcome, message: str = "") -> None:
        self.ending = ending
        super().__init__(message or ending.value)


class ModelServerError(RuntimeError):
    """The model server is down, answers with an error, or with something that is no completion."""


class TokensMissingError(ModelServerError):
    """Token ids and log-probabilities were asked for; they are missing or do not fit together."""


class SandboxTimeoutError(RuntimeError):
    """A command that only looks after the terminal did not come back."""
