"""What can go wrong, and who is to blame.

Two kinds of failure leave this package as one line. `UserError`: somebody asked for something that cannot be; exit code
2, and nothing was written half. `RunStoppedError`: a run that cannot go on for a reason that the user can act on (every
trial fails, every reward is equal); exit code 1. Everything else is a defect and keeps its stack trace.
What happens inside a trial is neither: it is an `Outcome` (see `harbortrainer.trials.outcome`).
"""

EXIT_STOPPED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """A mistake of the user's, told in one line: where, what, and what to do.

    Args:
        what: What is wrong, without a full stop.
        where: The file, and the key in it when there is one (`configs/a.toml: orchestrator.batch_size`).
        do: What the user should do, an imperative.

    Example:
        >>> print(UserError("no tasks here", where="datasets/empty", do="point tasks_dir at a folder of Harbor tasks"))
        datasets/empty: no tasks here; point tasks_dir at a folder of Harbor tasks
    """

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = what, where, do
        super().__init__((f"{where}: " if where else "") + what + (f"; {do}" if do else ""))


class RunStoppedError(Exception):
    """The run cannot go on.

    Args:
        what: What happened, without a full stop.
        do: What the user can do about it, an imperative.
    """

    def __init__(self, what: str, *, do: str = "") -> None:
        self.what, self.do = what, do
        super().__init__(what + (f"; {do}" if do else ""))


class ProofError(RuntimeError):
    """Tokens and log-probabilities, or rewards, do not belong together: training on them would be training on noise."""
