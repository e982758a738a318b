"""`harbortrainer train`: check a run, choose its engine, start it and wait for its end."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from harbortrainer.commands.opening import open_run
from harbortrainer.config.reader import RawRun, read
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor import foreign_tables
from harbortrainer.doctor.demands import told_at_the_start
from harbortrainer.doctor.examination import examine_file, examine_machine, examine_policy
from harbortrainer.doctor.finding import Finding, red_ones, show, stop_on_red, warn
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.errors import UserError
from harbortrainer.runs.loading import loading
from harbortrainer.tasks.task_store import fetch, is_here


def launch(file: Path, overrides: Sequence[str], *, engine: str, resume: bool, dry_run: bool, restarts: int = 0) -> int:
    """Check a run, choose its engine, start it and wait for its end.

    Raises:
        UserError: A mistake in the file or the options.
    """
    raw = read(file, overrides)
    with raw.blaming():
        plan = open_run(raw, engine=engine, resume=resume, dry_run=dry_run)
        if restarts and not plan.on_prime_rl:
            raise UserError("the embedded engine is not restarted", where="command line: --restarts", do="use --resume")
        findings = look(plan, dry_run=dry_run)
    if dry_run:
        show(findings)
        return rehearse(raw, plan, overrides, findings)
    warn(findings)
    stop_on_red(findings)
    for line in told(plan):
        print(line)
    if not isinstance(plan.run, RunConfig):
        from harbortrainer.engines.prime_rl.start import start

        return start(raw, plan.checkout, overrides, resume=resume, restarts=restarts)
    loading("torch and the model", "torch")
    from harbortrainer.commands.local_run import run_here

    return run_here(plan.run, resume=resume, docker="docker" in plan.environment_types)


def told(plan: LaunchPlan) -> Iterator[str]:
    """What the file leaves to be guessed, a line each: a table that was forgotten shows here, not in the weights."""
    yield from told_at_the_start(plan)
    if isinstance(plan.run, RunConfig) and plan.run.lora is None:
        yield f"every weight of {plan.run.model.name} is trained; for an adapter alone, add [trainer.model.lora]"


def fetched(plan: LaunchPlan) -> LaunchPlan:
    """The plan with the sets of tasks here that were not; the same plan when none was missing.

    Raises:
        UserError: One cannot be had.
    """
    missing = {key: table.source for key, table in plan.tasksets.items() if not is_here(table.source)}
    for key, source in missing.items():
        try:
            fetch(source)
        except UserError as error:
            where = f"{plan.where(f'{key}.dataset')}: {error.where}"
            raise UserError(error.what, where=where, do=error.do) from error
    return replace(plan) if missing else plan


def look(plan: LaunchPlan, *, dry_run: bool) -> list[Finding]:
    """What the checks find; a mistake in the file is told before anything slow is imported, or tasks are fetched.

    Raises:
        UserError: Tasks cannot be fetched, or a red finding that needs no slow import; in a dry run only one about the
            file.
    """
    findings = examine_file(plan)
    if dry_run and red_ones(findings):
        show(findings)
    stop_on_red(findings)
    if not dry_run and (whole := fetched(plan)) is not plan:
        plan, findings = whole, examine_file(whole)
        stop_on_red(findings)
    findings += examine_machine(plan)
    if not dry_run:
        stop_on_red(findings)
    assert plan.run is not None
    foreign_tables.check(plan.run, plan.file)
    if not dry_run:
        findings += examine_policy(plan)
        stop_on_red(findings)
    return findings


def rehearse(raw: RawRun, plan: LaunchPlan, overrides: Sequence[str], findings: list[Finding]) -> int:
    """A dry run: Prime-RL checks its own file; a red finding is the exit code, but stops nothing."""
    code = 0
    if plan.on_prime_rl:
        from harbortrainer.engines.prime_rl.start import start

        code = start(raw, plan.checkout, overrides, dry_run=True)
    stop_on_red(findings)
    if code == 0:
        print(f"{raw.file}: fine; nothing was started")
    return code
