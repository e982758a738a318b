"""Why a local run ended early, in one line.

`RunStoppedError` is a run that cannot go on for a reason the user can act on (every trial fails, every reward is
equal, tokens and log-probabilities do not belong together). It is not a defect and not a mistake in the config.
"""


class RunStoppedError(Exception):
    """The run cannot go on.

    Args:
        what: What happened, without a full stop.
        do: What the user can do about it, an imperative.
    """

    def __init__(self, what: str, *, do: str = "") -> None:
        self.what, self.do = what, do
        super().__init__(what + (f"; {do}" if do else ""))
