"""What can go wrong, and who is to blame.

Two kinds of failure leave this package. `UserError`: somebody asked for something that cannot be; it is shown as
one line, with exit code 2, and nothing was written half. Everything else is a defect and keeps its stack trace.
What happens inside a trial is neither: it is an `Outcome` (see `harbortrainer.trials.outcome`).
"""

EXIT_USER_ERROR = 2


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
