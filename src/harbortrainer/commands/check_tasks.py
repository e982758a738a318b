"""`harbortrainer tasks check`: run oracle, nop and cheating agents on each task, and report the verdicts.

A verdict is logged in `outputs/verdicts.jsonl`, written to the requested reports, and then printed.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from harbortrainer.commands.check_report import CheckReport, lint_lines, verdict_line
from harbortrainer.commands.tasks import plain
from harbortrainer.config.environment_table import environment_entry
from harbortrainer.config.plugin import NEAR_COPY, Leftovers
from harbortrainer.config.task_source import task_source
from harbortrainer.doctor import preflight
from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.runs.disk_faults import disk_error
from harbortrainer.runs.display import Display
from harbortrainer.tasks.cheats import CHEATS
from harbortrainer.tasks.near_duplicates import overlap
from harbortrainer.tasks.passed_checks import record_verdict
from harbortrainer.tasks.task_errors import inspected
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_store import load_source
from harbortrainer.tasks.task_subset import LoadedTasks, TaskSubset, load_subset
from harbortrainer.tasks.verdict import Verdict, bad, weak
from harbortrainer.tasks.verdict_log import VerdictLog


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
    audit: bool = False
    """Whether to run the audit's trials and searches too."""
    benchmarks: Sequence[str] = ()
    """Sources whose tasks are reported as overlap."""
    parallel: int = 2
    """Tasks to check in parallel."""
    keep: Path | None = None
    """Folder to keep the trials in."""
    resume: bool = False
    """Skip tasks with a verdict of an earlier check with the same options."""
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

    def verdict_options(self, where: SandboxOptions) -> dict[str, JsonValue]:
        """Return the options on which a verdict depends."""
        return {
            "repeats": self.repeats,
            "cheats": list(self.chosen_cheats),
            "reward_key": self.reward_key,
            "leftovers": self.leftovers,
            **({"audit": True} if self.audit else {}),
            "environment_kwargs": where.kwargs,
        }

    def chosen_leftovers(self, environment_type: str) -> Leftovers:
        """Return `leftovers`. Raises `UserError` for another word, or if the environment type cannot kill."""
        if self.leftovers == "keep":
            return "keep"
        if self.leftovers == "kill" and environment_entry(environment_type).examinable:
            return "kill"
        do = 'write keep or kill; kill needs environment type "local" or "docker"'
        raise UserError(f"{self.leftovers!r} is not possible with {environment_type}", where="--leftovers", do=do)


def check_tasks(source: str, subset: TaskSubset, where: SandboxOptions, plan: CheckPlan) -> int:
    """Run each task with oracle, nop and cheats; returns 1 when a task is not fit to train on, or none was run.

    Each verdict is logged and reported at once, so that nothing is lost when the check is stopped.

    Raises:
        UserError: The source has no tasks, or no task can run because of this machine.
        RunStoppedError: The folder of the kept trials was removed, or its disk is full.
        KeyboardInterrupt: SIGINT or SIGTERM stopped the check; its sandboxes were removed.
    """
    preflight.check_type(where.kind)
    cheats, leftovers = plan.chosen_cheats, plan.chosen_leftovers(where.kind)
    report = CheckReport(where.kind, 0, plan.json, plan.markdown)
    report.check_writable()
    loaded = load_subset(task_source(source), subset)
    report.total = loaded.total
    copied = copies(loaded, plan.benchmarks)
    log = VerdictLog(plan.verdict_options(where))
    pending, known = find_pending(loaded, where, log if plan.resume else None)
    with Display() as display, display.bar("checking tasks", len(pending) + len(known.unusable)) as bar:

        def add(*verdicts: Verdict) -> None:
            for verdict in verdicts:
                log.add(verdict)
                add_copies(verdict, copied)
                record_verdict(verdict, leftovers, audited=plan.audit)
            report.add(verdicts)
            for verdict in verdicts:
                for line in (verdict_line(verdict), *lint_lines(verdict)):
                    display.line(plain(line))
                bar.advance()

        for verdict in known.earlier:
            add_copies(verdict, copied)
        report.add(known.earlier)
        if known.earlier:
            display.line(f"{len(known.earlier)} tasks were checked before")
        add(*known.unusable)
        run_trials(list(pending.values()), where, plan, cheats, add)
    report.print_summary()
    judged = [verdict for verdict in report.verdicts if verdict.trials or not subset.skip_bad]
    return 0 if judged and not any(verdict.problem for verdict in judged) else 1


def copies(loaded: LoadedTasks, benchmarks: Sequence[str]) -> dict[str, list[str]]:
    """Return the benchmarks' tasks that each task copies, by the task's name.

    Raises:
        UserError: A benchmark has no tasks, or cannot be fetched.
    """
    found: dict[str, list[str]] = {}
    for benchmark in benchmarks:
        for pair in overlap(load_source(task_source(benchmark), skip=lambda error: None), loaded.tasks, NEAR_COPY):
            found.setdefault(pair.task.name, []).append(f"{pair.of.name} of {benchmark} ({pair.reason})")
    return found


def add_copies(verdict: Verdict, copied: Mapping[str, Sequence[str]]) -> None:
    """Add a weak finding to the verdict on a task that copies a benchmark's task."""
    if of := copied.get(verdict.task):
        verdict.findings.insert(
            sum(finding.severity == "bad" for finding in verdict.findings), weak("task", f"a copy of {', '.join(of)}")
        )


@dataclass(frozen=True)
class KnownVerdicts:
    """Verdicts that need no trial."""

    earlier: list[Verdict] = field(default_factory=list)
    """Verdicts of an earlier check."""
    unusable: list[Verdict] = field(default_factory=list)
    """Verdicts on tasks that cannot be read, or that this machine cannot run."""


def find_pending(
    loaded: LoadedTasks, where: SandboxOptions, log: VerdictLog | None
) -> tuple[dict[str, TaskRef], KnownVerdicts]:
    """Return the tasks to check by name, and the verdicts on the others.

    Args:
        loaded: The tasks of the subset.
        where: Their environment.
        log: Log of an earlier check to continue; None checks all tasks.

    Raises:
        UserError: No task can run because of this machine.
    """
    placed = list(inspected(list(loaded.tasks), where.kind, where.kwargs, loaded.leave_out))
    logged = log.read() if log else {}
    earlier = {
        task.name: found.model_copy(update={"task": task.name})
        for task, choice, _ in placed
        if (found := logged.get((task.key, choice.kind)))
    }
    left = [one for one in placed if one[0].name not in earlier]
    refused = preflight.refused_tasks(left, "--environment")
    unusable = [Verdict(task=name, findings=[bad("task", str(error))]) for name, error in loaded.bad.items()]
    pending = {}
    for task, choice, _ in left:
        if error := refused.get(task.name):
            host = [bad("host", str(error))]
            unusable.append(Verdict(task=task.name, key=task.key, environment=choice.kind, findings=host))
        else:
            pending[task.name] = task
    return pending, KnownVerdicts(list(earlier.values()), unusable)


def run_trials(
    tasks: Sequence[TaskRef],
    where: SandboxOptions,
    plan: CheckPlan,
    cheats: Sequence[str],
    on_verdict: Callable[[Verdict], None],
) -> None:
    """Check the tasks.

    Raises:
        RunStoppedError: The folder of the kept trials was removed, or its disk is full.
        KeyboardInterrupt: SIGINT or SIGTERM stopped the check; its sandboxes were removed.
    """
    from harbortrainer.tasks.task_check import check_tasks as check

    async def until_stopped() -> None:
        current = asyncio.current_task()
        assert current is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, current.cancel)
        await check(
            tasks,
            environment_type=where.kind,
            environment_kwargs=where.kwargs,
            trusted=where.trusted,
            repeats=plan.repeats,
            cheats=cheats,
            reward_key=plan.reward_key,
            leftovers=plan.chosen_leftovers(where.kind),
            audit=plan.audit,
            concurrency=plan.parallel,
            keep=plan.keep,
            on_verdict=on_verdict,
        )

    try:
        with keep_folder_errors(plan.keep):
            asyncio.run(until_stopped())
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("stopped; to continue, run the same command with --resume", file=sys.stderr)
        raise KeyboardInterrupt from None


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
        raise RunStoppedError(what, do="run the same command with --resume to continue") from error
