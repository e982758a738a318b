"""`harbortrainer tasks check`: oracle, nop and cheats on each task."""

import asyncio
import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from harbortrainer.commands.check_report import line, write_json, write_markdown
from harbortrainer.config.task_source import task_source
from harbortrainer.doctor import docker_daemon
from harbortrainer.doctor.finding import stop_on_red
from harbortrainer.doctor.folders import existing
from harbortrainer.errors import RunStoppedError, UserError
from harbortrainer.runs.disk_faults import in_one_line
from harbortrainer.runs.display import Display
from harbortrainer.sandbox.environment_choice import chosen
from harbortrainer.sandbox.task_demands import TaskDemands
from harbortrainer.tasks.cheats import CHEATS
from harbortrainer.tasks.task_store import load_source
from harbortrainer.tasks.verdict import Verdict


class Sandboxes:
    """Where trials run: a type of environment, and `NAME=VALUE` of its class; a VALUE is JSON, else a string."""

    def __init__(self, kind: str, settings: Sequence[str]) -> None:
        self.kind = kind
        self.kwargs = dict(_pair(setting) for setting in settings)


def _pair(setting: str) -> tuple[str, JsonValue]:
    name, is_one, value = setting.partition("=")
    if not is_one:
        raise UserError(
            f"{setting!r} is no NAME=VALUE", where="--environment-kwarg", do="write image=host, for example"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@dataclass(frozen=True, kw_only=True)
class CheckPlan:
    """What a check tries, and where it says what it found."""

    repeats: int = 3
    """Trials of the oracle."""
    cheats: str = "all"
    """`all`, `none`, or names with commas between them."""
    parallel: int = 2
    """Tasks at once."""
    keep: Path | None = None
    """Folder in which the trials stay."""
    resume: bool = False
    """Leave out what passed before."""
    json: Path | None = None
    markdown: Path | None = None

    @property
    def chosen_cheats(self) -> tuple[str, ...]:
        """Names of the cheats. Raises `UserError` for one that there is not."""
        told = {"all": tuple(CHEATS), "none": ()}
        names = told[self.cheats] if self.cheats in told else tuple(self.cheats.split(","))
        if unknown := [name for name in names if name not in CHEATS]:
            do = f"all, none, or some of {', '.join(CHEATS)}"
            raise UserError(f"no cheat is called {unknown[0]!r}", where="--cheats", do=do)
        return names

    def need_room_for_reports(self) -> None:
        """Raise `UserError` when a report could not be written: told before the trials, not after."""
        for flag, file in (("--json", self.json), ("--markdown", self.markdown)):
            if file is not None and (file.is_dir() or not os.access(existing(file.parent), os.W_OK)):
                raise UserError("cannot be written", where=f"{flag} {file}", do="name a file in a folder of your own")


def check_tasks(source: str, where: Sandboxes, plan: CheckPlan) -> int:
    """Run each task with the oracle, with nothing and with cheats; 1 when a task is not fit to train on.

    A verdict is written down as it comes, so a check that was stopped goes on with `resume`; the reports hold what was
    found until then.

    Raises:
        RunStoppedError: The folder in which the trials stay was removed, or its disk is full.
    """
    from harbortrainer.tasks.task_check import check_tasks as check
    from harbortrainer.tasks.task_check import passed, remember

    cheats = plan.chosen_cheats
    plan.need_room_for_reports()
    unread: list[UserError] = []
    found = load_source(task_source(source), skip=unread.append)
    kinds = {task.name: chosen(task.path, where.kind, where.kwargs).kind for task in found}
    before = {kind: passed(kind) if plan.resume else set() for kind in kinds.values()}
    left = {task.name: task for task in found if task.key not in before[kinds[task.name]]}
    if "docker" in kinds.values():
        closed = any(TaskDemands(task.path).closes_the_network for task in found if kinds[task.name] == "docker")
        stop_on_red(list(docker_daemon.needed("--environment", closed=closed)))
    verdicts: list[Verdict] = []
    with Display() as display, display.bar("checking tasks", len(left)) as bar:
        for error in unread:
            display.line(f"BAD  {error}")
        if len(left) < len(found):
            display.line(f"{len(found) - len(left)} tasks passed before")

        def tell(verdict: Verdict) -> None:
            verdicts.append(verdict)
            if not verdict.problem:
                remember([left[verdict.task]], verdict.environment)
            display.line(line(verdict))
            bar.advance()

        checking = check(
            list(left.values()),
            environment_type=where.kind,
            environment_kwargs=where.kwargs,
            repeats=plan.repeats,
            cheats=cheats,
            concurrency=plan.parallel,
            keep=plan.keep,
            on_verdict=tell,
        )
        try:
            with keeping(plan.keep):
                asyncio.run(checking)
        finally:
            report(
                plan, sorted(verdicts, key=lambda verdict: verdict.task), [str(error) for error in unread], where.kind
            )
    return conclude(verdicts, fit_before=len(found) - len(left), of=len(found) + len(unread))


@contextmanager
def keeping(folder: Path | None) -> Generator[None]:
    """Tell in one line what the disk did to the folder in which the trials stay."""
    try:
        yield
    except OSError as error:
        told = in_one_line(error, folder.absolute()) if folder is not None else None
        if told is None:
            raise
        gone = f"{folder}, the folder of --keep, was removed or moved away while the check was going"
        what = gone if isinstance(error, FileNotFoundError) else told.what
        raise RunStoppedError(what, do="the same command with --resume leaves out what passed") from error


def report(plan: CheckPlan, verdicts: Sequence[Verdict], unread: Sequence[str], environment: str) -> None:
    """Write what was asked for."""
    if plan.json is not None:
        write_json(plan.json, verdicts, unread, environment)
    if plan.markdown is not None:
        write_markdown(plan.markdown, verdicts, unread, environment)


def conclude(verdicts: Sequence[Verdict], *, fit_before: int, of: int) -> int:
    """Print the last line; the exit code."""
    fit = [verdict for verdict in verdicts if not verdict.problem]
    weak = sum(bool(verdict.forged) for verdict in fit)
    more = f"; {weak} of them reward a cheat" if weak else ""
    print(f"{len(fit) + fit_before} of {of} tasks are fit to train on{more}")
    return 0 if len(fit) + fit_before == of else 1
