"""`harbortrainer doctor`: the checks of this machine."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from harbortrainer.commands.opening import open_run
from harbortrainer.config.reader import read
from harbortrainer.doctor import foreign_tables
from harbortrainer.doctor.examination import examine_file, examine_machine, examine_policy
from harbortrainer.doctor.finding import red_ones, show
from harbortrainer.errors import EXIT_USER_ERROR, UserError


def diagnose(file: Path | None, overrides: Sequence[str], *, engine: str) -> int:
    """Print the checks of this machine, for a run file when there is one; 2 when one is red.

    Raises:
        UserError: A mistake in the run file, or words that change a file when there is none.
    """
    if file is None and overrides:
        do = "name the run file with --config"
        raise UserError(f"{overrides[0]!r} changes a run file", where="command line", do=do)
    raw = None if file is None else read(file, overrides)
    with nullcontext() if raw is None else raw.blaming():
        plan = open_run(raw, engine=engine)
        if plan.run is not None:
            foreign_tables.check(plan.run, plan.file)
    findings = [*examine_file(plan), *examine_machine(plan), *examine_policy(plan)]
    show(findings)
    return EXIT_USER_ERROR if red_ones(findings) else 0
