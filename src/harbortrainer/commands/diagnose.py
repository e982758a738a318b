"""`harbortrainer doctor`: check a run file and this machine for it; without one, list what this machine can do."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from harbortrainer.commands.opening import open_run
from harbortrainer.config.reader import read
from harbortrainer.doctor import verifiers_config
from harbortrainer.doctor.capabilities import examine_capabilities
from harbortrainer.doctor.checks import examine_file, examine_machine, examine_policy, measure_policy
from harbortrainer.doctor.finding import error_of, green, red_ones, show
from harbortrainer.errors import EXIT_USER_ERROR, UserError, joined


def diagnose(file: Path | None, overrides: Sequence[str], *, engine: str, measure: bool = False) -> int:
    """Print the findings of all checks; returns 2 when one is red. With `measure`, load the model if none is.

    Raises:
        UserError: A mistake in the run file, or an override or `measure` without a run file.
    """
    if file is None and measure:
        raise UserError("--measure needs a run file", where="command line", do="add --config FILE")
    if file is None and overrides:
        raise UserError(f"{overrides[0]!r} overrides a run file's key", where="command line", do="add --config FILE")
    raw = None if file is None else read(file, overrides)
    with nullcontext() if raw is None else raw.locating_errors():
        plan = open_run(raw, engine=engine)
        findings = examine_file(plan)
        if plan.run is not None and (wrong := verifiers_config.errors(plan.run, plan.file)):
            raise joined([*wrong, *map(error_of, red_ones(findings))]) or wrong[0]
    findings += [*examine_machine(plan), *examine_policy(plan)]
    if measure:
        red = red_ones(findings)
        findings += [green("pace", "not measured, because of the red findings")] if red else measure_policy(plan)
    if raw is None:
        findings = [*examine_capabilities(plan), *findings]
    show(findings)
    if raw is None:
        print("`harbortrainer doctor --config FILE` checks a run file, and this machine for it.")
    return EXIT_USER_ERROR if red_ones(findings) else 0
