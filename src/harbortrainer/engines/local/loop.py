"""The training loop of the embedded engine."""

from typing import TYPE_CHECKING

from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.summary import Summary

if TYPE_CHECKING:
    from harbortrainer.config.runfile import RunConfig


def train(config: "RunConfig", run: RunFolder, *, resume: bool = False) -> Summary:
    """Train a policy on this machine, in this process. Blocks until the run is finished or stopped.

    Raises:
        UserError: Something in the config cannot be.
        RunStopped: The run cannot go on; the message says why and what to do.
    """
    raise NotImplementedError
