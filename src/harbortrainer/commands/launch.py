"""`harbortrainer train`: check a run, choose its engine, start it and wait for it."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from harbortrainer.commands.opening import open_run
from harbortrainer.config.reader import RawRun, read
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor import verifiers_config
from harbortrainer.doctor.checks import examine_file, examine_machine, examine_policy
from harbortrainer.doctor.finding import Finding, red_ones, show, stop_on_red, warn
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.doctor.task_checks import placement_lines
from harbortrainer.errors import UserError
from harbortrainer.runs.display import next_lines
from harbortrainer.tasks.task_store import fetch, is_available


def launch(file: Path, overrides: Sequence[str], *, engine: str, resume: bool, dry_run: bool, restarts: int = 0) -> int:
    """Check and start a run; returns the exit code when the run has ended.

    Raises:
        UserError: A mistake in the file or the options.
    """
    raw = read(file, overrides)
    with raw.locating_errors():
        plan = open_run(raw, engine=engine, resume=resume, dry_run=dry_run)
        if restarts and not plan.on_prime_rl:
            what = "the embedded engine does not support restarts"
            raise UserError(what, where="command line: --restarts", do="remove it, and use --resume after a failure")
        findings = check_plan(plan, dry_run=dry_run)
    if dry_run:
        show(findings)
        return finish_dry_run(raw, plan, overrides, findings, resume=resume)
    warn(findings)
    stop_on_red(findings)
    for line in start_messages(plan):
        print(line)
    if not isinstance(plan.run, RunConfig):
        from harbortrainer.engines.prime_rl.start import start

        code = start(raw, plan.checkout, overrides, resume=resume, restarts=restarts)
    else:
        from harbortrainer.commands.local_run import run_here

        code = run_here(plan.run, resume=resume, kinds=list(plan.environment_types))
    if code == 0:
        print("\n".join(next_lines(next_commands(plan))))
    return code


def next_commands(plan: LaunchPlan) -> list[tuple[str, str]]:
    """Return the commands that a user may want after a run, each with its purpose."""
    assert plan.run is not None
    run = shlex.quote(str(plan.run.run_dir))
    commands = run_commands(plan.run.run_dir)
    if not plan.on_prime_rl:
        held_out = [table for key, table in plan.tasksets.items() if key.startswith("orchestrator.eval.")]
        tasks = shlex.quote(str(held_out[0].source)) if held_out and held_out[0].split == "all" else "TASKS"
        commands.insert(1, (f"harbortrainer eval {tasks} --model {run}", "its reward on these or on other tasks"))
    return commands


def run_commands(run_dir: Path) -> list[tuple[str, str]]:
    """Return the commands for a run's folder that every engine's runs have, each with its purpose."""
    run = shlex.quote(str(run_dir))
    view, export = f"harbortrainer view {run}", f"harbortrainer export {run}"
    return [(view, "rewards, tasks and trials in a browser"), (export, "the trained model, for vLLM or the hub")]


def start_messages(plan: LaunchPlan) -> Iterator[str]:
    """Messages on settings that follow from defaults, so that the user notices a forgotten table before training."""
    yield from placement_lines(plan)
    if isinstance(plan.run, RunConfig) and plan.run.lora is None:
        yield f"full fine-tuning of {plan.run.model.name}; to train a LoRA adapter instead, add [trainer.model.lora]"


def fetch_tasksets(plan: LaunchPlan) -> LaunchPlan:
    """Fetch the task sets that are not on this machine. Returns a fresh plan, or `plan` itself when none was missing.

    Raises:
        UserError: A task set cannot be fetched.
    """
    missing = {key: table.source for key, table in plan.tasksets.items() if not is_available(table.source)}
    for key, source in missing.items():
        try:
            fetch(source)
        except UserError as error:
            where = f"{plan.where(f'{key}.dataset')}: {error.where}"
            raise UserError(error.what, where=where, do=error.do) from error
    return replace(plan) if missing else plan


def check_plan(plan: LaunchPlan, *, dry_run: bool) -> list[Finding]:
    """Run all checks. Mistakes in the run file are reported before tasks are fetched or slow packages are imported.

    Raises:
        UserError: Tasks cannot be fetched, or there is a red finding; in a dry run, only red findings of the run file.
    """
    findings = examine_file(plan)
    if dry_run and red_ones(findings):
        show(findings)
    stop_on_red(findings)
    if not dry_run and (complete := fetch_tasksets(plan)) is not plan:
        plan, findings = complete, examine_file(complete)
        stop_on_red(findings)
    findings += examine_machine(plan)
    if not dry_run:
        stop_on_red(findings)
    assert plan.run is not None
    verifiers_config.check(plan.run, plan.file)
    if not dry_run:
        findings += examine_policy(plan)
        stop_on_red(findings)
    return findings


def finish_dry_run(
    raw: RawRun, plan: LaunchPlan, overrides: Sequence[str], findings: list[Finding], *, resume: bool
) -> int:
    """Let Prime-RL check its own file, then raise on a red finding; returns the exit code."""
    code = 0
    if plan.on_prime_rl:
        from harbortrainer.engines.prime_rl.start import start

        code = start(raw, plan.checkout, overrides, resume=resume, dry_run=True)
    stop_on_red(findings)
    if code == 0:
        print(f"{raw.file}: no problems found; nothing was started")
    return code
