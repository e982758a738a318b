"""`harbortrainer eval`: evaluate any model or agent on a task set, or compare two evaluations.

Invariant: the agent's name, the tasks, the model's files, the output folder and the model server are checked before
verifiers, torch or Harbor is imported.
"""

import shlex
from datetime import datetime
from pathlib import Path

from harbortrainer.commands.tasks import print_bad
from harbortrainer.commands.trial_options import TrialOptions, check_available, load_libraries
from harbortrainer.config.environment_table import environment_entry
from harbortrainer.config.run_sections import Prices
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.task_source import TaskSource, task_source
from harbortrainer.doctor import preflight, task_checks
from harbortrainer.engines.cleanup import clean_up_predecessor, end_sandboxes, print_lines
from harbortrainer.engines.prime_rl.checkout import apply_dotenv
from harbortrainer.errors import EXIT_INTERRUPTED, RunStoppedError, UserError
from harbortrainer.estimates.interval import IntervalKind
from harbortrainer.evaluation.candidate import Candidate
from harbortrainer.evaluation.eval_comparison import EvalComparison
from harbortrainer.evaluation.eval_folder import EvalFolder, EvalSpec
from harbortrainer.evaluation.eval_rules import EvalRules
from harbortrainer.evaluation.report import EvalReport, as_lines, as_markdown
from harbortrainer.runs.disk_faults import disk_faults
from harbortrainer.runs.display import Display, plural
from harbortrainer.runs.durable import write_whole
from harbortrainer.runs.label import run_label
from harbortrainer.runs.provenance import package_versions
from harbortrainer.tasks.measured_rates import refuse_overwrite, write_rates
from harbortrainer.tasks.task_errors import inspected
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_listing import read_tags
from harbortrainer.tasks.task_store import FOLDER
from harbortrainer.tasks.task_subset import LoadedTasks, TaskSubset, load_subset

DEFAULT_ROOT = Path("outputs/evals")


class EvalOrder(TrialOptions):
    """Options of the command, by their names."""

    tasks: str | None
    config: Path | None
    attempts: int
    parallel: int | None
    out: Path | None
    resume: bool
    ci: str
    compare: tuple[Path, Path] | None
    difficulty: Path | None
    max_model_len: int | None
    price_in: float | None
    price_out: float | None
    include: list[str] | None
    exclude: list[str] | None
    limit: int | None
    shard: str | None
    skip_bad: bool

    @property
    def interval(self) -> IntervalKind:
        """Method of the confidence intervals."""
        if self.ci not in ("t", "bootstrap"):
            raise UserError(f"unknown interval {self.ci!r}", where="--ci", do="choose t or bootstrap")
        return "t" if self.ci == "t" else "bootstrap"

    @property
    def prices(self) -> Prices | None:
        """Token prices; None when no price was given."""
        if (self.price_in is None) != (self.price_out is None):
            raise UserError("only one price was given", where="command line", do="pass both --price-in and --price-out")
        if self.price_in is None or self.price_out is None:
            return None
        return Prices(prompt=self.price_in, sampled=self.price_out)

    @property
    def subset(self) -> TaskSubset:
        """The tasks to evaluate on."""
        return TaskSubset(self.include or (), self.exclude or (), self.shard, self.limit, self.skip_bad)

    @property
    def source(self) -> TaskSource:
        """Source of the tasks."""
        if self.tasks is None:
            do = "pass a folder of tasks or another source, or --compare with two evaluation folders"
            raise UserError("no tasks given", where="harbortrainer eval", do=do)
        return task_source(self.tasks)


def evaluate(order: EvalOrder) -> int:
    """Compare two evaluations, or run and report one; returns the exit code.

    Raises:
        UserError: A user's mistake, or a model server that does not respond. Finished trials are kept.
        RunStoppedError: No trial could be graded.
    """
    kind, _ = order.interval, order.prices
    if order.compare is None:
        return run_evaluation(order)
    if order.tasks is not None:
        do = "leave out the tasks; they are read from the two folders"
        raise UserError("--compare does not run tasks", where="harbortrainer eval", do=do)
    first, second = map(EvalFolder.read, order.compare)
    for line in EvalComparison.of(first, second, kind=kind).lines():
        print(line)
    return 0


def run_evaluation(order: EvalOrder) -> int:
    """Check everything, run the missing trials, write and print the report; returns the exit code."""
    apply_dotenv()
    order.check()
    loaded = load_subset(order.source, order.subset)
    folder = loaded.fetched.folder.absolute()
    candidate = order.candidate()
    rules, run, file = order.rules(candidate, config=order.config, max_model_len=order.max_model_len)
    requirements = usable_tasks(loaded, rules)
    spec = eval_identity(order, candidate, rules, folder, loaded.tasks)
    out = order.out or default_folder(folder)
    if order.out is None and order.resume:
        raise UserError("no evaluation to resume was given", where="--resume", do="pass its folder with --out")
    EvalFolder.checked(out, spec, resume=order.resume)
    if order.difficulty is not None:
        refuse_overwrite(order.difficulty)
    print_bad(loaded)
    task_checks.warn_about(requirements, rules.environment_type, "--environment")
    if environment_entry(rules.environment_type).chosen_from:
        print(task_checks.placement_line(requirements))
    check_available(candidate)
    parallel = order.parallel or default_parallel(run, rules)
    with disk_faults(out.absolute()):
        code = run_trials(order, candidate, spec, out, loaded.tasks, parallel=parallel, file=file)
    return code or loaded.exit_code


def default_parallel(run: RunConfig | None, rules: EvalRules) -> int:
    """Return the concurrent trials of an evaluation without `--parallel`: as many as the run's, at most 32."""
    max_inflight = run.orchestrator.concurrency.max_inflight if run else None
    return min(max_inflight or rules.parallel or 8, rules.parallel or 32, 32)


def default_folder(tasks: Path) -> Path:
    """Name a new folder after the tasks and the time."""
    named = tasks.parent if tasks.name == FOLDER else tasks
    return DEFAULT_ROOT / f"{named.name}-{datetime.now():%Y%m%d-%H%M%S}"


def usable_tasks(loaded: LoadedTasks, rules: EvalRules) -> task_checks.TaskReport:
    """Leave out the tasks that the sandboxes cannot run or must not run, and report on the others.

    Raises:
        UserError: No task is left.
    """
    loaded.require_some()
    where, kind, kwargs = "--environment", *rules.sandboxes
    for task in list(loaded.tasks):
        if error := task_checks.refusal(task, kind, kwargs, where, rules.trusted_tasks, rules.agent_name):
            loaded.leave_out(task, error)
    placed = list(inspected(list(loaded.tasks), kind, kwargs, loaded.leave_out))
    refused = preflight.refused_tasks(placed, where)
    for task, _, _ in placed:
        if error := refused.get(task.name):
            loaded.leave_out(task, error)
    loaded.require_some()
    return task_checks.inspect_tasks(loaded.tasks, kind, kwargs, task_checks.variables(), rules.trusted_tasks)


def eval_identity(
    order: EvalOrder, candidate: Candidate, rules: EvalRules, folder: Path, tasks: list[TaskRef]
) -> EvalSpec:
    """Describe the evaluation for its folder: model, tasks, attempts, rules and packages."""
    return EvalSpec(
        policy=candidate.name,
        identity=candidate.identity(),
        tasks_dir=str(folder),
        tasks={task.name: task.key for task in tasks},
        attempts=order.attempts,
        rules=rules,
        packages=package_versions(),
    )


def run_trials(
    order: EvalOrder,
    candidate: Candidate,
    spec: EvalSpec,
    out: Path,
    tasks: list[TaskRef],
    *,
    parallel: int,
    file: Path | None,
) -> int:
    """Run the trials and report; returns the exit code."""
    load_libraries(candidate, "verifiers", "verifiers.v1")
    from harbortrainer.evaluation.measuring import run_missing_trials

    folder, kinds = EvalFolder.begin(out, spec, resume=order.resume), [spec.rules.environment_type]
    with Display() as display:
        for line in clean_up_predecessor(folder.path, kinds, [folder.path]):
            display.line(line)
        display.line(f"{candidate.name} on {plural(len(spec.keys), 'task')} x {spec.attempts}; trials in {folder.path}")
        if file is not None:
            display.line(f"settings from {file}")
        try:
            done = run_missing_trials(folder, candidate, parallel=parallel, display=display)
        finally:
            print_lines(end_sandboxes(run_label(folder.path), kinds, trials=[folder.path]))
            report = write_report(order, folder, tasks)
            folder.release()
        for line in as_lines(report):
            display.line(line)
    return print_end(order, folder, report, done=done)


def print_end(order: EvalOrder, folder: EvalFolder, report: EvalReport, *, done: bool) -> int:
    """Print where the results are; returns the exit code."""
    if not done:
        out = shlex.quote(str(order.out or folder.path))
        print(f"stopped; to continue, run the same command with --out {out} --resume")
        return EXIT_INTERRUPTED
    if report.mean.mean is None:
        error = next((row.error for row in folder.rows() if row.error), "no message")
        do = f"see {folder.path / 'set_aside'}; --resume runs them again"
        raise RunStoppedError(f"none of {sum(report.outcomes.values())} trials could be graded: {error}", do=do)
    if order.difficulty is not None:
        write_rates(order.difficulty, report.rates())
        print(f"pass rates of {len(report.rates().tasks)} tasks: {order.difficulty}")
    print(f"results: {folder.path}; `harbor view {shlex.quote(str(folder.path.parent))}` shows the trials")
    return 0


def write_report(order: EvalOrder, folder: EvalFolder, tasks: list[TaskRef]) -> EvalReport:
    """Write `report.json`, `report.md` and the files of a Harbor job, from the rows on disk."""
    from harbortrainer.harbor_compat.job_folder import write_job
    from harbortrainer.sandbox.environment_types import environment_config

    spec, rows = folder.spec, folder.rows()
    tags = {task.key: read_tags(task.path) for task in tasks}
    report = EvalReport.of(spec, rows, kind=order.interval, tags=tags, prices=order.prices, all_rows=folder.all_rows())
    write_whole(folder.path / "report.json", report.model_dump_json(indent=1) + "\n")
    write_whole(folder.path / "report.md", as_markdown(report))
    passes = {int(p.name[5:]): p.estimate.mean for p in report.passes if p.name.startswith("pass@")}
    write_job(
        folder.path,
        tasks_dir=Path(spec.tasks_dir),
        agent=spec.rules.agent_name,
        model=None if spec.identity.keys() == {"agent"} else spec.policy,
        environment=environment_config(spec.rules.environment_type),
        attempts=spec.attempts,
        total=len(spec.keys) * spec.attempts,
        counted=[row.trial for row in rows if row.graded],
        mean=report.mean.mean,
        pass_at_k={k: mean for k, mean in passes.items() if mean is not None},
        finished=report.missing == 0,
    )
    return report
