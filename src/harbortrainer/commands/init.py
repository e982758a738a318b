"""`harbortrainer init`: write a run file for a set of tasks, a model and a machine, and print the next commands.

Contract: no file is overwritten. The text is validated by the readers of run files before it is written.
"""

import math
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harbortrainer.commands.chosen_policy import DEFAULT_MODEL, GROUP, ChosenPolicy, check_model, choose_policy
from harbortrainer.commands.chosen_tasks import ACCESS, ChosenTasks, choose_tasks
from harbortrainer.commands.new_run_file import RunChoices, file_name, run_file
from harbortrainer.config.prime_rl_run import plugin_envs, prime_run
from harbortrainer.config.reader import RawRun, from_raw
from harbortrainer.config.runfile import RunBasics
from harbortrainer.doctor import gpus as gpu_checks
from harbortrainer.doctor import pace, run_file_checks, task_checks, verifiers_config
from harbortrainer.doctor.finding import Finding, Level, error_of
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.doctor.machine_checks import check_words
from harbortrainer.engines.engine_choice import GPUS_NEEDED, EngineChoice, Gpu, choose, find_gpus
from harbortrainer.engines.prime_rl.checkout import find
from harbortrainer.errors import UserError
from harbortrainer.runs.display import name_first, next_lines, plural
from harbortrainer.tasks.passed_checks import passed_keys
from harbortrainer.tasks.task_limits import agent_seconds
from harbortrainer.warmup.tasks_with_solution import TRAINING_TASKS, with_solution

DEFAULT_OUTPUT = Path("run.toml")
OUTPUT_DIR: Path = RunBasics.model_fields["output_dir"].default
_MIB_PER_GB = 1024
_TOKENS_A_SECOND = {"GPU": 45.0, "CPU": 10.0}
"""Assumed sampling speed of one trial among others, for time limits only."""


@dataclass(frozen=True, kw_only=True)
class InitOrder:
    """The arguments of the command. None means: look on this machine."""

    tasks: str | None
    model: str | None
    warmup: bool = False
    """Whether a warm-up teaches the solutions of the training tasks first."""
    engine: str | None
    gpus: int | None
    gpu_memory: float | None
    """GB of each GPU."""
    trust: Sequence[str] = ()
    """Names or patterns of tasks that may access this machine."""
    output: Path


def init(order: InitOrder) -> int:
    """Write the run file and print what was chosen and the next commands; returns 0.

    Raises:
        UserError: The file exists, or the tasks, the model or the machine do not allow a run.
    """
    if order.output.exists():
        raise UserError("already exists", where=str(order.output), do="pass another file with --output")
    if not order.output.parent.is_dir():
        raise UserError("its folder does not exist", where=str(order.output), do="create it, or change --output")
    gpus = planned_gpus(order)
    choice = planned_engine(order, gpus)
    unknown = check_model(order.model or DEFAULT_MODEL)  # before Harbor reads the tasks, which takes seconds
    tasks = choose_tasks(order.tasks, order.trust)
    if order.warmup:
        check_warmup_order(tasks, choice)
    played = [*tasks.train, *tasks.held_out]
    policy = choose_policy(order.model, gpus=gpus, on_prime_rl=choice.engine == "prime-rl", tasks=played)
    choices = run_choices(order, tasks, policy, choice, gpus)
    text = run_file(choices)
    plan = read_text(text, order.output, choice, gpus)
    findings = check_plan(plan, fits=policy.planned)
    write_new(order.output, text)
    warned = [*unknown, *warnings(tasks, findings)]
    for line in [*summary(order, choices, choice), *warned, *next_commands(order, choices)]:
        print(line)
    return 0


def write_new(path: Path, text: str) -> None:
    """Write a new file whole; a failure leaves none, so that the command can be repeated."""
    try:
        with path.open("x", encoding="utf-8"):
            pass
        try:
            path.write_text(text, encoding="utf-8")
        except OSError:
            path.unlink()
            raise
    except OSError as error:
        do = "correct that, or change --output"
        raise UserError(f"cannot be written: {error.strerror}", where=str(path), do=do) from None


def check_warmup_order(tasks: ChosenTasks, choice: EngineChoice) -> None:
    """Raise `UserError` if the run's engine has no warm-up, or no training task has a solution."""
    if choice.engine != "local":
        do = "run `harbortrainer warmup` first, or pass --engine local"
        raise UserError("only the embedded engine has a [warmup]", where="--warmup", do=do)
    try:
        with_solution(tasks.train, TRAINING_TASKS)
    except UserError as error:
        raise UserError(f"{error.where}: {error.what}", where="--warmup", do="leave the option out") from None


def planned_gpus(order: InitOrder) -> list[Gpu]:
    """Return the GPUs to train on: as the options say, by default this machine's.

    Raises:
        UserError: The options contradict each other, or the memory is unknown.
    """
    found = find_gpus()
    if order.gpus is None and order.gpu_memory is None:
        return found
    count = 1 if order.gpus is None else order.gpus
    if order.gpu_memory is None and count > len(found):
        raise UserError(f"this machine has {len(found) or 'no'} GPUs", where="--gpus", do="pass --gpu-memory GB too")
    if order.gpu_memory is None:
        return found[:count]
    return [Gpu(f"{order.gpu_memory:g} GB", int(order.gpu_memory * _MIB_PER_GB))] * count


def planned_engine(order: InitOrder, gpus: Sequence[Gpu]) -> EngineChoice:
    """Return the engine of the option; by default the one that `train` would choose on that machine."""
    choice = choose(order.engine or "auto", find(), list(gpus))
    if order.engine is None and (order.gpus is not None or order.gpu_memory is not None):
        reason = f"for {len(gpus) or 'no'} GPU{'s' * (len(gpus) != 1)}"
        choice = EngineChoice("prime-rl" if len(gpus) >= GPUS_NEEDED else "local", reason)
    if choice.engine == "prime-rl" and len(gpus) < GPUS_NEEDED:
        what = f"Prime-RL needs {GPUS_NEEDED} GPUs or more, not {len(gpus)}"
        raise UserError(what, where="--engine prime-rl", do="pass --gpus N --gpu-memory GB, or --engine local")
    return choice


def run_choices(
    order: InitOrder, tasks: ChosenTasks, policy: ChosenPolicy, choice: EngineChoice, gpus: Sequence[Gpu]
) -> RunChoices:
    """Collect what the run file is written from."""
    train = trainer_gpus(policy, gpus) if choice.engine == "prime-rl" else 0
    return RunChoices(
        name=free_name(file_name(str(tasks.source) if order.output == DEFAULT_OUTPUT else order.output.stem)),
        command=command_of(order),
        tasks=tasks,
        policy=policy,
        on_prime_rl=choice.engine == "prime-rl",
        num_train_gpus=train,
        num_infer_gpus=len(gpus) - train,
        timeout_multiplier=timeout_multiplier(tasks, policy),
        warmup=order.warmup,
    )


def free_name(name: str) -> str:
    """Return a name whose run folder does not exist: `name`, `name-2`, ..."""
    names = [name, *(f"{name}-{number}" for number in range(2, 1000))]
    return next(one for one in names if not (OUTPUT_DIR / one).exists())


def trainer_gpus(policy: ChosenPolicy, gpus: Sequence[Gpu]) -> int:
    """Return the number of GPUs that hold the trainer's share of the model; at least one samples."""
    _, room = gpu_checks.usable_memory(gpus)
    needed = math.ceil((policy.size or 0) * gpu_checks.TRAINING_BYTES["float32"] / room)
    return min(max(1, needed), len(gpus) - 1)


def timeout_multiplier(tasks: ChosenTasks, policy: ChosenPolicy) -> float:
    """Return the factor that makes the shortest time limit of a task's agent hold the longest trial; at least 1."""
    limits = agent_seconds([*tasks.train, *tasks.held_out])
    longest = pace.Pace(policy.max_turns, policy.seq_len, _TOKENS_A_SECOND[policy.device], policy.device)
    return max(1.0, math.ceil(longest.trial_seconds() / min(limits)))


def command_of(order: InitOrder) -> str:
    """Return the command line, with the options that were given."""
    options = {
        "--model": order.model,
        "--engine": order.engine,
        "--gpus": order.gpus,
        "--gpu-memory": None if order.gpu_memory is None else f"{order.gpu_memory:g}",
        "--output": None if order.output == DEFAULT_OUTPUT else order.output,
    }
    words = ["--warmup"] * order.warmup + trust_words(order)
    words += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return shlex.join(["harbortrainer", "init", *([order.tasks] if order.tasks else []), *words])


def trust_words(order: InitOrder) -> list[str]:
    """Return the options `--trust` that were given."""
    return [word for name in order.trust for word in ("--trust", name)]


def read_text(text: str, output: Path, choice: EngineChoice, gpus: Sequence[Gpu]) -> LaunchPlan:
    """Read the text as the engine does.

    Raises:
        UserError: The engine, the plugin or verifiers refuse it.
    """
    raw = RawRun(str(output), tomllib.loads(text))
    run = prime_run(raw) if choice.engine == "prime-rl" else from_raw(raw)
    verifiers_config.check(run, raw.file)
    envs = plugin_envs(run, raw.file)
    return LaunchPlan(choice=choice, checkout=find(), gpus=list(gpus), file=raw.file, run=run, envs=envs)


def check_plan(plan: LaunchPlan, *, fits: bool) -> list[Finding]:
    """Run the doctor's checks that need neither the trained machine nor a start; `fits`: the model is known to fit.

    Raises:
        UserError: The model does not fit.
    """
    for finding in [] if fits else gpu_checks.check(plan):
        if finding.level is Level.RED and plan.run is not None:
            raise UserError(finding.what, where=f"--model {plan.run.model.name}", do=finding.do)
    checks = (run_file_checks.check_numbers, task_checks.check_requirements)
    return [finding for check in checks for finding in check(plan)]


def summary(order: InitOrder, choices: RunChoices, choice: EngineChoice) -> Iterator[str]:
    """Yield what was chosen, one line per subject."""
    tasks, policy = choices.tasks, choices.policy
    yield f"wrote {order.output}"
    counts = f"{len(tasks.train)} to train on, {len(tasks.held_out)} held out"
    yield f"  tasks    {counts}, in {tasks.sandbox.kind} sandboxes"
    yield f"  model    {policy.name}, LoRA, samples of up to {policy.seq_len} tokens ({policy.seq_len_reason})"
    if policy.needs_plain_agent:
        yield "  agent    plain: one shell command per answer; this model is too small for Terminus-2 (docs/agents.md)"
        if not order.warmup:
            yield "  warm-up  none; such a model may never succeed and then learns nothing: --warmup teaches solutions"
    yield f"  engine   {choice.engine} ({choice.reason})"
    yield f"  step     {plural(choices.groups, 'task')} x {GROUP} trials, {choices.inflight} at once"


def warnings(tasks: ChosenTasks, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a line for tasks that are left out, and for each finding that asks for something."""
    if tasks.left_out:
        named = name_first([f"{name} ({reason})" for name, reason in tasks.left_out.items()])
        yield _printable(f"warning: left out (exclude): {plural(len(tasks.left_out), 'task')}: {named}")
        if any(ACCESS in reason for reason in tasks.left_out.values()):
            do = "delete the file and run `init` again with `--trust NAME`"
            yield f"  read the tasks that access this machine; if you trust them, {do} (docs/check-tasks.md)"
    if tasks.unchecked:
        yield f"warning: left out (checked_only): {plural(tasks.unchecked, 'task')} not checked, or failed"
        yield f"  to include them, first run `{check_command(tasks)}`"
    if tasks.unreadable:
        named = name_first([f"{error.where}: {error.what}" for error in tasks.unreadable])
        yield _printable(
            f"warning: unreadable or duplicates (skip_bad): {plural(len(tasks.unreadable), 'task')}: {named}"
        )
    if not tasks.held_out:
        yield "warning: no task can be held out, so the evaluation measures the training tasks; add other tasks"
    for finding in findings:
        if finding.level is not Level.GREEN:
            yield f"warning: {error_of(finding)}"


def next_commands(order: InitOrder, choices: RunChoices) -> list[str]:
    """Return the next three commands."""
    engine = "prime-rl" if choices.on_prime_rl else "local"
    file = shlex.quote(str(order.output))
    checked = passed_keys()
    if all(task.key in checked for task in choices.tasks.train):
        first = f"harbortrainer doctor --config {file} --engine {engine}", "is this machine ready?"
    else:
        first = check_command(choices.tasks), f"if a task fails: checked_only = true, twice in {file}"
    return next_lines(
        [
            first,
            (f"harbortrainer train --config {file} --engine {engine}", "checks the machine, then trains"),
            (f"harbortrainer view {OUTPUT_DIR / choices.name}", "the run in a browser"),
        ]
    )


def check_command(tasks: ChosenTasks) -> str:
    """Return the command that checks the tasks in their sandbox."""
    words = check_words(str(tasks.source), tasks.sandbox.kind, tasks.sandbox.kwargs, tasks.trusted)
    return f"harbortrainer tasks check {words}"


def _printable(text: str) -> str:
    return re.sub(r"[^\x20-\x7e\u00a1-\U0010ffff]", "?", text)
