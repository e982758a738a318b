"""`harbortrainer tasks check`: run oracle, nop and cheating agents on each task, and report the verdicts.

Verdicts go to the terminal, and on request to a JSON file and a Markdown table.
"""

import asyncio
import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from harbortrainer.commands.tasks import plain
from harbortrainer.config.environment_table import environment_entry
from harbortrainer.config.plugin import Leftovers
from harbortrainer.config.task_source import task_source
from harbortrainer.doctor import docker_daemon
from harbortrainer.doctor.finding import stop_on_red
from harbortrainer.doctor.machine_checks import existing
from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.runs.disk_faults import disk_error
from harbortrainer.runs.display import Display
from harbortrainer.runs.durable import write_whole
from harbortrainer.tasks.cheats import CHEATS
from harbortrainer.tasks.task_errors import inspected
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_store import load_source
from harbortrainer.tasks.verdict import NOP, ORACLE, CheckedTrial, Verdict


def verdict_line(verdict: Verdict) -> str:
    """Format one verdict for the terminal."""
    word = "BAD " if verdict.problem else "WEAK" if is_weak(verdict) else "ok  "
    return f"{word} {verdict.task}  {findings_text(verdict)}".rstrip()


def lint_lines(verdict: Verdict) -> list[str]:
    """Format the findings of `harbor lint` on one task for the terminal, one line each."""
    return [f"lint {verdict.task}  {finding}" for finding in verdict.lint]


def is_weak(verdict: Verdict) -> bool:
    """Whether a task that is fit to train on has a reward to look at first."""
    return bool(verdict.forged or verdict.doubts)


def findings_text(verdict: Verdict) -> str:
    """Describe the findings on one task; empty when there are none."""
    return "; ".join(filter(None, (verdict.problem, rewarded_cheats(verdict), *verdict.doubts, verdict.note)))


def rewarded_cheats(verdict: Verdict) -> str:
    """List the cheats that got a reward, with the reward."""
    got = ", ".join(f"{cheat} ({reward:g})" for cheat, reward in verdict.forged.items())
    return f"a reward without a solution: {got}" if got else ""


def write_json(file: Path, verdicts: Sequence[Verdict], unread: Sequence[str], environment: str) -> None:
    """Write all verdicts with all their trials."""
    content = {
        "environment": environment,
        "fit": sum(not verdict.problem for verdict in verdicts),
        "tasks": [verdict.model_dump(mode="json") for verdict in verdicts],
        "unreadable": list(unread),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(content, indent=1) + "\n")


def write_markdown(file: Path, verdicts: Sequence[Verdict], unread: Sequence[str], environment: str) -> None:
    """Write a table: task, verdict, rewards, seconds of each phase, findings."""
    fit = sum(not verdict.problem for verdict in verdicts)
    lines = [
        f"# {fit} of {len(verdicts) + len(unread)} tasks are fit to train on (sandboxes: {environment})",
        "",
        "Seconds are means over the oracle's trials (nop's where there is no solution).",
        "",
        "| task | | oracle | nop | sandbox s | agent s | verifier s | findings |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(verdict) for verdict in verdicts),
        *(f"| | BAD | | | | | | {_cell(what)} |" for what in unread),
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, "\n".join(lines) + "\n")


def _row(verdict: Verdict) -> str:
    took = verdict.seconds
    phases = (took.environment_setup, took.agent_execution, took.verifier)
    cells = (
        verdict.task,
        verdict_line(verdict).split()[0],
        _rewards(verdict.of(ORACLE)),
        _rewards(verdict.of(NOP)),
        *("" if seconds is None else f"{seconds:.2f}" for seconds in phases),
        "; ".join(filter(None, (findings_text(verdict), *verdict.lint))),
    )
    return f"| {' | '.join(map(_cell, cells))} |"


def _rewards(trials: Sequence[CheckedTrial]) -> str:
    return ", ".join("none" if trial.reward is None else f"{trial.reward:g}" for trial in trials)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


class SandboxOptions:
    """The environment type, its `NAME=VALUE` options (a VALUE that is not JSON is a string), and the trusted tasks."""

    def __init__(self, kind: str, settings: Sequence[str], trusted: Sequence[str] = ()) -> None:
        self.kind, self.trusted = kind, trusted
        self.kwargs = dict(_pair(setting) for setting in settings)


def _pair(setting: str) -> tuple[str, JsonValue]:
    name, equals, value = setting.partition("=")
    if not equals:
        raise UserError(f"{setting!r} is not NAME=VALUE", where="--environment-kwarg", do="write e.g. image=host")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@dataclass(frozen=True, kw_only=True)
class CheckPlan:
    """The options of a check."""

    repeats: int = 3
    """Oracle trials per task."""
    cheats: str = "all"
    """`all`, `none`, or comma-separated names."""
    reward_key: str | None = None
    """The run's `reward_key`."""
    leftovers: str = "keep"
    """The run's `leftovers`."""
    parallel: int = 2
    """Tasks to check in parallel."""
    keep: Path | None = None
    """Folder to keep the trials in."""
    resume: bool = False
    """Skip tasks that passed before."""
    json: Path | None = None
    markdown: Path | None = None

    @property
    def chosen_cheats(self) -> tuple[str, ...]:
        """Names of the cheats to run. Raises `UserError` for an unknown name."""
        presets = {"all": tuple(CHEATS), "none": ()}
        names = presets[self.cheats] if self.cheats in presets else tuple(self.cheats.split(","))
        if unknown := [name for name in names if name not in CHEATS]:
            do = f"choose all, none, or some of {', '.join(CHEATS)}"
            raise UserError(f"there is no cheat {unknown[0]!r}", where="--cheats", do=do)
        return names

    def chosen_leftovers(self, environment_type: str) -> Leftovers:
        """Return `leftovers`. Raises `UserError` for another word, or if the environment type cannot kill."""
        if self.leftovers == "keep":
            return "keep"
        if self.leftovers == "kill" and environment_entry(environment_type).examinable:
            return "kill"
        do = 'write keep or kill; kill needs environment type "local" or "docker"'
        raise UserError(f"{self.leftovers!r} is not possible with {environment_type}", where="--leftovers", do=do)

    def check_reports_writable(self) -> None:
        """Raise `UserError` when a report file cannot be written. Call it before the trials run."""
        for flag, file in (("--json", self.json), ("--markdown", self.markdown)):
            if file is not None and (file.is_dir() or not os.access(existing(file.parent), os.W_OK)):
                raise UserError(
                    "cannot be written", where=f"{flag} {file}", do="name a file in a folder that you can write to"
                )


@dataclass(frozen=True)
class FoundTasks:
    """The tasks of a source, before the check."""

    pending: dict[str, TaskRef]
    """Tasks to check, by name."""
    passed_before: int
    """Number of tasks that `resume` skips."""
    unreadable: list[str]
    """Errors of the tasks that cannot be read."""

    @property
    def total(self) -> int:
        """Number of tasks in the source."""
        return len(self.pending) + self.passed_before + len(self.unreadable)


def check_tasks(source: str, where: SandboxOptions, plan: CheckPlan) -> int:
    """Run each task with oracle, nop and cheats; returns 1 when a task is not fit to train on.

    Each passed task is recorded at once, so `resume` continues a check that was stopped. The reports are written in
    that case too, with the verdicts so far.

    Raises:
        RunStoppedError: The folder of the kept trials was removed, or its disk is full.
    """
    cheats = plan.chosen_cheats
    plan.check_reports_writable()
    found = find_tasks(source, where, plan)
    verdicts: list[Verdict] = []
    try:
        run_trials(found, where, plan, cheats, verdicts)
    finally:
        report(plan, sorted(verdicts, key=lambda verdict: verdict.task), found.unreadable, where.kind)
    return print_summary(verdicts, fit_before=found.passed_before, of=found.total)


def find_tasks(source: str, where: SandboxOptions, plan: CheckPlan) -> FoundTasks:
    """Load the tasks of a source. If some need Docker, check that it works.

    Raises:
        UserError: The source has no tasks, or Docker does not work.
    """
    from harbortrainer.tasks.task_check import checked_as, passed_keys

    leftovers = plan.chosen_leftovers(where.kind)
    unreadable: list[UserError] = []
    tasks = load_source(task_source(source), skip=unreadable.append)
    found = list(inspected(tasks, where.kind, where.kwargs, lambda task, error: unreadable.append(error)))
    passed = {kind: passed_keys(checked_as(kind, leftovers)) for kind in {choice.kind for _, choice, _ in found}}
    pending = {task.name: task for task, choice, _ in found if not plan.resume or task.key not in passed[choice.kind]}
    if in_docker := [needs for _, choice, needs in found if environment_entry(choice.kind).needs_docker]:
        closed = any(needs.restricts_network for needs in in_docker)
        stop_on_red(list(docker_daemon.needed("--environment", closed=closed)))
    return FoundTasks(pending, len(found) - len(pending), [str(error) for error in unreadable])


def run_trials(
    found: FoundTasks, where: SandboxOptions, plan: CheckPlan, cheats: Sequence[str], verdicts: list[Verdict]
) -> None:
    """Check the pending tasks; append each verdict as soon as it is known, print it, and record a passed task.

    Raises:
        RunStoppedError: The folder of the kept trials was removed, or its disk is full.
    """
    from harbortrainer.tasks.task_check import check_tasks as check
    from harbortrainer.tasks.task_check import checked_as, record_passed

    leftovers = plan.chosen_leftovers(where.kind)
    with Display() as display, display.bar("checking tasks", len(found.pending)) as bar:
        for error in found.unreadable:
            display.line(plain(f"BAD  {error}"))
        if found.passed_before:
            display.line(f"{found.passed_before} tasks passed before")

        def record(verdict: Verdict) -> None:
            verdicts.append(verdict)
            if not verdict.problem:
                record_passed([found.pending[verdict.task]], checked_as(verdict.environment, leftovers))
            for line in (verdict_line(verdict), *lint_lines(verdict)):
                display.line(plain(line))
            bar.advance()

        checking = check(
            list(found.pending.values()),
            environment_type=where.kind,
            environment_kwargs=where.kwargs,
            trusted=where.trusted,
            repeats=plan.repeats,
            cheats=cheats,
            reward_key=plan.reward_key,
            leftovers=leftovers,
            concurrency=plan.parallel,
            keep=plan.keep,
            on_verdict=record,
        )
        with keep_folder_errors(plan.keep):
            asyncio.run(checking)


@contextmanager
def keep_folder_errors(folder: Path | None) -> Generator[None]:
    """Turn an `OSError` of the folder of kept trials into a `RunStoppedError`."""
    try:
        yield
    except OSError as error:
        fault = disk_error(error, folder.absolute()) if folder is not None else None
        if fault is None:
            raise
        gone = f"the --keep folder {folder} was removed or moved during the check"
        what = gone if isinstance(error, FileNotFoundError) else fault.what
        raise RunStoppedError(what, do="run the same command with --resume to skip tasks that passed") from error


def report(plan: CheckPlan, verdicts: Sequence[Verdict], unread: Sequence[str], environment: str) -> None:
    """Write the requested report files."""
    if plan.json is not None:
        write_json(plan.json, verdicts, unread, environment)
    if plan.markdown is not None:
        write_markdown(plan.markdown, verdicts, unread, environment)


def print_summary(verdicts: Sequence[Verdict], *, fit_before: int, of: int) -> int:
    """Print the last line and return the exit code."""
    fit = [verdict for verdict in verdicts if not verdict.problem]
    cheated, doubtful = sum(bool(v.forged) for v in fit), sum(bool(v.doubts) for v in fit)
    more = f"; {cheated} of them reward a cheat" if cheated else ""
    more += f"; {doubtful} of them have a doubtful reward" if doubtful else ""
    print(f"{len(fit) + fit_before} of {of} tasks are fit to train on{more}")
    return 0 if len(fit) + fit_before == of else 1
