"""The errors that a command reports as one line, and its exit codes.

- `UserError`: a user's mistake. Exit code 2; no file is left half-written.
- `RunStoppedError`: the run cannot continue, for a reason that the user can act on. Exit code 1.

Any other exception is a bug and keeps its stack trace. A failure inside a trial is not an exception but an `Outcome`
(see `harbortrainer.trials.outcome`).
"""

EXIT_STOPPED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """A user's mistake. Its message is one line: where, what is wrong, what to do.

    Args:
        what: What is wrong, without a full stop.
        where: The file, and its key if there is one (`configs/a.toml: orchestrator.batch_size`).
        do: What the user should do, in the imperative.

    Example:
        >>> print(UserError("no tasks here", where="datasets/empty", do="point tasks_dir at a folder of Harbor tasks"))
        datasets/empty: no tasks here; point tasks_dir at a folder of Harbor tasks
    """

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = what, where, do
        super().__init__((f"{where}: " if where else "") + what + (f"; {do}" if do else ""))


class RunStoppedError(Exception):
    """The run cannot continue.

    Args:
        what: What happened, without a full stop.
        do: What the user can do, in the imperative.
    """

    def __init__(self, what: str, *, do: str = "") -> None:
        self.what, self.do = what, do
        super().__init__(what + (f"; {do}" if do else ""))


class ProofError(RuntimeError):
    """Tokens do not match their log-probabilities, or trials their rewards: training on them would train on noise."""
