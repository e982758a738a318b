"""What each command does, between the command line and the parts that do the work.

Contract: nothing is written before everything was checked. Functions return exit codes; mistakes are `UserError`.
"""

from collections.abc import Sequence
from pathlib import Path

from harbortrainer.errors import UserError


def launch(file: Path, overrides: Sequence[str], *, engine: str, resume: bool, dry_run: bool) -> int:
    """Check a run, choose its engine, start it and wait for its end."""
    raise UserError("not there yet")


def diagnose(file: Path | None, overrides: Sequence[str], *, engine: str) -> int:
    """Print the checks of this machine; 2 when one is red."""
    raise UserError("not there yet")


def warm_up(file: Path, overrides: Sequence[str], out: Path) -> Path:
    """Make the policy that `[warmup]` describes."""
    raise UserError("not there yet")


def serve_model(model: str, *, port: int, max_model_len: int, seed: int) -> None:
    """Serve a model with the embedded sampler until Ctrl-C."""
    raise UserError("not there yet")


def check_tasks(folder: Path, *, environment: str, parallel: int) -> int:
    """Run each task with oracle and nop."""
    raise UserError("not there yet")
