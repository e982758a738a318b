"""`harbortrainer eval`: play a task set with any policy, report on it, compare two such evaluations.

Cheap before dear: the agent's name, the tasks, the policy's files, the folder and the model's server are looked at
before verifiers, torch or Harbor is imported.
"""

import asyncio
import os
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from harbortrainer.commands.check_tasks import Sandboxes
from harbortrainer.config.monitors_table import Prices
from harbortrainer.config.plugin import AUTO
from harbortrainer.config.task_source import TaskSource, task_source
from harbortrainer.doctor import agent_names, demands
from harbortrainer.engines.prime_rl.cleanup import end_containers
from harbortrainer.engines.prime_rl.command import dotenv
from harbortrainer.errors import EXIT_INTERRUPTED, RunStoppedError, UserError
from harbortrainer.estimates.interval import IntervalKind
from harbortrainer.evaluation.candidate import Candidate, LocalModel, choose
from harbortrainer.evaluation.eval_comparison import EvalComparison
from harbortrainer.evaluation.eval_folder import EvalFolder, Evaluated
from harbortrainer.evaluation.eval_report import EvalReport
from harbortrainer.evaluation.play_rules import PlayRules, read_run, run_file
from harbortrainer.evaluation.report_text import as_lines, as_markdown
from harbortrainer.runs.disk_faults import disk_faults
from harbortrainer.runs.display import Display
from harbortrainer.runs.durable import write_whole
from harbortrainer.runs.ingredients import releases
from harbortrainer.runs.label import run_label
from harbortrainer.runs.loading import loading
from harbortrainer.tasks.measured_rates import refuse_foreign, write_rates
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_store import FOLDER, fetch, load_source
from harbortrainer.tasks.task_tags import tags_of

DEFAULT_ROOT = Path("outputs/evals")
DEFAULT_CONTEXT = 32768
"""Most tokens of a model that is served here, unless a run file or the command line says otherwise."""


class EvalOrder(BaseModel):
    """What the command line asks for, by the names of its options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: str | None
    model: str | None
    base_url: str | None
    api_key_var: str
    agent: str | None
    config: Path | None
    environment: str | None
    environment_kwarg: list[str] | None
    attempts: int
    parallel: int | None
    out: Path | None
    resume: bool
    ci: str
    compare: tuple[Path, Path] | None
    difficulty: Path | None
    temperature: float | None
    max_tokens: int | None
    max_turns: int | None
    max_model_len: int | None
    price_in: float | None
    price_out: float | None

    @property
    def interval(self) -> IntervalKind:
        """How intervals are computed."""
        if self.ci not in ("t", "bootstrap"):
            raise UserError(f"no interval {self.ci!r}", where="--ci", do="choose t or bootstrap")
        return "t" if self.ci == "t" else "bootstrap"

    @property
    def prices(self) -> Prices | None:
        """What tokens cost, where both were said."""
        if (self.price_in is None) != (self.price_out is None):
            raise UserError("one price is missing", where="command line", do="give --price-in and --price-out")
        if self.price_in is None or self.price_out is None:
            return None
        return Prices(prompt=self.price_in, sampled=self.price_out)

    @property
    def source(self) -> TaskSource:
        """Where the tasks come from."""
        if self.tasks is None:
            do = "name a folder of tasks or another source, or --compare two evaluations"
            raise UserError("no tasks", where="harbortrainer eval", do=do)
        return task_source(self.tasks)


def evaluate(order: EvalOrder) -> int:
    """Do what the command line says: compare, or play and report. The exit code.

    Raises:
        UserError: A mistake, or a model's server that does not answer; what was measured is kept.
        RunStoppedError: Not one trial could be graded.
    """
    kind, _ = order.interval, order.prices
    if order.compare is None:
        return measure_policy(order)
    if order.tasks is not None:
        do = "leave the tasks out: they are in the two folders"
        raise UserError("--compare plays nothing", where="harbortrainer eval", do=do)
    first, second = map(EvalFolder.read, order.compare)
    for line in EvalComparison.of(first, second, kind=kind).lines():
        print(line)
    return 0


def measure_policy(order: EvalOrder) -> int:
    """Look at everything that can be wrong, play what is missing, write the report and print it; the exit code."""
    os.environ.update({key: value for key, value in dotenv().items() if key not in os.environ})
    if order.agent is not None:
        agent_names.refuse(order.agent, "--agent")
    folder, tasks = tasks_of(order.source)
    candidate = choose(model=order.model, base_url=order.base_url, agent=order.agent, key_var=order.api_key_var)
    file = run_file(order.model if isinstance(candidate, LocalModel) else None, order.config)
    run = read_run(file)
    kwargs = Sandboxes("", order.environment_kwarg or []).kwargs
    rules = PlayRules.of(run, environment=order.environment, environment_kwargs=kwargs, agent=order.agent)
    agent_names.refuse(rules.player, f"{file}: env.agent.harness.agent")
    rules = rules_of(order, candidate, rules)
    about = evaluated(order, candidate, rules, folder, tasks)
    out = (
        order.out
        or DEFAULT_ROOT
        / f"{folder.parent.name if folder.name == FOLDER else folder.name}-{datetime.now():%Y%m%d-%H%M%S}"
    )
    if order.out is None and order.resume:
        raise UserError("a resume needs to know which evaluation", where="--resume", do="name its folder with --out")
    EvalFolder.checked(out, about, resume=order.resume)
    if order.difficulty is not None:
        refuse_foreign(order.difficulty)
    told = demands.refuse(tasks, *rules.sandboxes, where="--environment")
    if rules.environment_type == AUTO:
        print(demands.placed(told))
    look_at(candidate, rules)
    most = run.orchestrator.concurrency.max_inflight if run else None
    with disk_faults(out.absolute()):
        return work(order, candidate, about, out, tasks, parallel=order.parallel or min(most or 8, 32), file=file)


def default_folder(tasks: Path) -> Path:
    """A new folder, named after the tasks and the time of day."""
    named = tasks.parent if tasks.name == FOLDER else tasks
    return DEFAULT_ROOT / f"{named.name}-{datetime.now():%Y%m%d-%H%M%S}"


def tasks_of(source: TaskSource) -> tuple[Path, list[TaskRef]]:
    """The folder of a source's tasks, and those that can be read, with a line for each that cannot.

    Raises:
        UserError: No task can be read.
    """
    unread: list[UserError] = []
    fetched = fetch(source)
    found = load_source(fetched.source, skip=unread.append)
    for error in unread:
        print(f"left out: {error}")
    return fetched.folder.absolute(), found


def rules_of(order: EvalOrder, candidate: Candidate, rules: PlayRules) -> PlayRules:
    """The rules with what the command line says; a model that is served here has a bound on its context."""
    limit = order.max_model_len
    if limit is None and rules.max_model_len is None and isinstance(candidate, LocalModel):
        limit = candidate.files.context_limit(DEFAULT_CONTEXT)
    return rules.changed(
        temperature=order.temperature, max_tokens=order.max_tokens, max_turns=order.max_turns, max_model_len=limit
    )


def evaluated(
    order: EvalOrder, candidate: Candidate, rules: PlayRules, folder: Path, tasks: list[TaskRef]
) -> Evaluated:
    """What this evaluation is."""
    return Evaluated(
        policy=candidate.name,
        identity=candidate.identity(),
        tasks_dir=str(folder),
        tasks={task.name: task.key for task in tasks},
        attempts=order.attempts,
        rules=rules,
        packages=releases(),
    )


def look_at(candidate: Candidate, rules: PlayRules) -> None:
    """Raise `UserError` when the model's server or the sandbox cannot be had."""
    candidate.check()
    if rules.environment_type not in ("local", AUTO):
        from harbortrainer.sandbox.environment_types import environment_config

        environment_config(rules.environment_type)
        return
    from harbortrainer.sandbox.probe import missing_tools, problem

    if missing := missing_tools():
        do = f"run `sudo apt-get install {' '.join(missing)}`"
        raise UserError(f"{', '.join(missing)} not found", where="--environment local", do=do)
    if why := asyncio.run(problem()):
        do = "see docs/sandbox.md, or use --environment docker"
        raise UserError(f"no local sandbox can start here: {why}", where="--environment local", do=do)


def work(
    order: EvalOrder,
    candidate: Candidate,
    about: Evaluated,
    out: Path,
    tasks: list[TaskRef],
    *,
    parallel: int,
    file: Path | None,
) -> int:
    """Play and report; the exit code."""
    if isinstance(candidate, LocalModel):
        from harbortrainer.engines.engine_choice import need_extra

        need_extra("torch", "transformers", "peft", "fastapi", "uvicorn")
    loading("verifiers" + (", torch and the model" if isinstance(candidate, LocalModel) else ""), "verifiers")
    from harbortrainer.evaluation.measuring import measure

    folder = EvalFolder.begin(out, about, resume=order.resume)
    with Display() as display:
        display.line(f"{candidate.name} on {len(about.keys)} tasks x {about.attempts}; trials in {folder.path}")
        if file is not None:
            display.line(f"played as {file} says")
        try:
            done = measure(folder, candidate, parallel=parallel, display=display)
        finally:
            if about.rules.environment_type in ("docker", AUTO):
                end_containers(run_label(folder.path))
            report = write_report(order, folder, tasks)
            folder.release()
        for line in as_lines(report):
            display.line(line)
    return finish(order, folder, report, done=done)


def finish(order: EvalOrder, folder: EvalFolder, report: EvalReport, *, done: bool) -> int:
    """Say where all is, and what the end means."""
    if not done:
        print(f"stopped; the same command with --out {order.out or folder.path} --resume goes on")
        return EXIT_INTERRUPTED
    if report.mean.mean is None:
        error = next((row.error for row in folder.rows() if row.error), "no message")
        do = f"see {folder.path / 'set_aside'}; --resume plays them again"
        raise RunStoppedError(f"not one of {sum(report.outcomes.values())} trials could be graded: {error}", do=do)
    if order.difficulty is not None:
        write_rates(order.difficulty, report.rates())
        print(f"measured pass rates of {len(report.rates().tasks)} tasks: {order.difficulty}")
    print(f"everything is in {folder.path}; `harbor view {folder.path.parent}` shows its trials")
    return 0


def write_report(order: EvalOrder, folder: EvalFolder, tasks: list[TaskRef]) -> EvalReport:
    """`report.json`, `report.md` and the files of Harbor's job, from what is on disk."""
    from harbortrainer.harbor_side.job_folder import write_job
    from harbortrainer.sandbox.environment_types import environment_config

    about, rows = folder.about, folder.rows()
    tags = {task.key: tags_of(task.path) for task in tasks}
    report = EvalReport.of(about, rows, kind=order.interval, tags=tags, prices=order.prices)
    write_whole(folder.path / "report.json", report.model_dump_json(indent=1) + "\n")
    write_whole(folder.path / "report.md", as_markdown(report))
    passes = {int(p.name[5:]): p.estimate.mean for p in report.passes if p.name.startswith("pass@")}
    write_job(
        folder.path,
        tasks_dir=Path(about.tasks_dir),
        agent=about.rules.player,
        model=None if about.identity.keys() == {"agent"} else about.policy,
        environment=environment_config(about.rules.environment_type),
        attempts=about.attempts,
        total=len(about.keys) * about.attempts,
        counted=[row.trial for row in rows if row.graded],
        mean=report.mean.mean,
        pass_at_k={k: mean for k, mean in passes.items() if mean is not None},
        finished=report.missing == 0,
    )
    return report
