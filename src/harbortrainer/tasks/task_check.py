"""Check whether tasks are trainable: the oracle must always reach the top reward, and doing nothing never.

The check runs real trials in a real sandbox, before training. A verifier that always passes, never passes or is random
gives no signal. A policy in training finds a reward that a cheat can get. Invariant: an error of one task does not end
the check of the others.
"""

import asyncio
import os
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from harbortrainer.config.agent_table import TRAINABLE_TERMINUS
from harbortrainer.config.plugin import Leftovers
from harbortrainer.config.trusted_tasks import is_trusted, trust_remedy
from harbortrainer.errors import UserError
from harbortrainer.harbor_compat.task_lint import lint_findings
from harbortrainer.runs.scratch_folder import scratch_folder
from harbortrainer.sandbox.environment_types import EnvironmentChoice, choose_environment, unsupported_remedy
from harbortrainer.sandbox.task_requirements import TaskRequirements
from harbortrainer.tasks.audit import guesses, read_files, static_findings
from harbortrainer.tasks.cheats import CHEATING_AGENT, CHEATS, MUTANT_AGENT, MUTANTS
from harbortrainer.tasks.checked_trial import Category, CheckedTrial, checked_trial
from harbortrainer.tasks.file_faults import faults
from harbortrainer.tasks.ignored_keys import ignored_keys
from harbortrainer.tasks.task_errors import MACHINE_ERRORS, describe, reading_task
from harbortrainer.tasks.task_folder import TaskRef, has_solution
from harbortrainer.tasks.verdict import NOP, ORACLE, TOP_REWARD, Finding, Verdict, bad, never_solved, note, verdict_of
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.trial_spec import TrialSpec

_ORDER = ("bad", "weak", "note")


async def check_tasks(
    tasks: Sequence[TaskRef],
    *,
    environment_type: str = "local",
    environment_kwargs: Mapping[str, JsonValue] | None = None,
    trusted: Sequence[str] = (),
    repeats: int = 1,
    cheats: Sequence[str] = (),
    reward_key: str | None = None,
    leftovers: Leftovers = "keep",
    audit: bool = False,
    concurrency: int = 2,
    keep: Path | None = None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Check each task with a sequence of trials and return the verdicts in the order of `tasks`.

    Args:
        tasks: Tasks to check.
        environment_type: Type of the sandboxes (`local`, `docker`, `auto`, ...).
        environment_kwargs: Keyword arguments of the environment's class.
        trusted: Names or patterns of tasks that may access this machine.
        repeats: Number of oracle trials.
        cheats: Names of the cheats to try.
        reward_key: Key of the verifier's rewards to train on, as in a run.
        leftovers: Whether processes that an agent left running are kept or killed before grading.
        audit: Whether to run guesses and mutants too, and to search for answers that the agent can read.
        concurrency: Tasks checked in parallel.
        keep: Folder for Harbor's trial folders; None removes them.
        on_verdict: Called with each verdict when its task is done.
    """
    gate = asyncio.Semaphore(concurrency)

    async def one(task: TaskRef, trials_dir: Path) -> Verdict:
        verdict = Verdict(task=task.name, key=task.key)
        try:
            with reading_task(task.path):
                choice = choose_environment(task.path, environment_type, environment_kwargs or {})
                spec = TrialSpec(
                    task_dir=task.path,
                    trials_dir=trials_dir,
                    environment_type=choice.kind,
                    environment_kwargs=choice.kwargs,
                    trusted=is_trusted(task.name, trusted),
                    reward_key=reward_key,
                    leftovers=leftovers,
                    keep_trials="all",
                )
                requirements = TaskRequirements(task.path, task.config)
                notes = list(_notes(requirements, choice, spec.trusted))
                unsupported = _unsupported(task, requirements, spec)
            async with gate:
                verdict = unsupported or await _verdict(task, requirements, spec, repeats, cheats, audit)
            verdict.environment = choice.kind
            verdict.findings += notes
        except UserError as error:
            verdict = failed(task, "task", str(error), error.__cause__)
        verdict.lint = await asyncio.to_thread(lint_findings, task.path)
        on_verdict(verdict)
        return verdict

    with scratch_folder("check") as folder:
        return await _gather(one(task, keep or folder) for task in tasks)


async def _gather[T](work: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Run coroutines concurrently and return their results.

    The first error, or a cancellation, cancels the others; their errors are ignored.
    """
    tasks = [asyncio.create_task(one) for one in work]
    if not tasks:
        return []
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        return [task.result() for task in tasks if task in ended]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _notes(requirements: TaskRequirements, choice: EnvironmentChoice, trusted: bool) -> Iterator[Finding]:
    """Yield the warnings about a task's files that do not affect the verdict."""
    if trusted and (reach := requirements.exposure(choice.kind)):
        yield note("host", f"sandbox not isolated: {', '.join(reach)}")
    if ports := requirements.shared_ports(choice.kind, choice.kwargs):
        yield note("network", f"concurrent trials share this machine's ports: {', '.join(map(str, ports))}")
    if variables := requirements.localhost_variables(choice.kind, choice.kwargs, os.environ):
        what = "passes localhost URLs into the sandbox, where localhost is the sandbox itself"
        yield note("network", f"{what}: {', '.join(variables)}")
    if files := requirements.ignored_files():
        yield note("task", f"Harbor ignores {', '.join(files)}, and reads only docker-compose.yaml")
    if problem := requirements.trajectory_problem(TRAINABLE_TERMINUS):
        yield note("task", f"Terminus-2 cannot play it: {problem}")
    if keys := ignored_keys(requirements.config):
        yield note("task", f"Harbor ignores these task.toml keys: {', '.join(keys)}")


def _unsupported(task: TaskRef, requirements: TaskRequirements, spec: TrialSpec) -> Verdict | None:
    """Return the verdict on a task that cannot run in this environment, or must not; None if it can."""
    if not spec.trusted and (reach := requirements.exposure(spec.environment_type)):
        problem = f"refused, since it can access this machine: {'; '.join(reach)}; {trust_remedy([task.name])}"
        return failed(task, "unsupported", problem)
    if refusal := requirements.refusal():
        return failed(task, "task", f"Harbor refuses it: {refusal}; correct the files, or exclude the task by name")
    start, unset = (
        f"cannot run in {spec.environment_type}: ",
        requirements.unset_variables(os.environ, solution=has_solution(task.path)),
    )
    if unsupported := requirements.unsupported(spec.environment_type, spec.environment_kwargs):
        do = unsupported_remedy(spec.environment_type, in_file=False)
        return failed(task, "unsupported", start + "; ".join([*unsupported, *unset, do]))
    return failed(task, "host", start + "; ".join(unset)) if unset else None


async def _verdict(
    task: TaskRef, requirements: TaskRequirements, spec: TrialSpec, repeats: int, cheats: Sequence[str], audit: bool
) -> Verdict:
    closed = requirements.closed_phases()
    scripts = {cheat: CHEATS[cheat] for cheat in cheats}
    guessed: dict[str, str] = {}
    answers: list[Finding] = []
    try:
        if audit:
            files = await asyncio.to_thread(read_files, task)
            answers = await asyncio.to_thread(static_findings, files)
            guessed = guesses(files)
        mutants = list(MUTANTS) if audit and (task.path / "solution" / "solve.sh").is_file() else []
        trials = [trial async for trial in _trials(task, spec, repeats, scripts, guessed, mutants, closed)]
        verdict = verdict_of(task.name, task.key, trials)
    except UserError as error:
        return failed(task, "task", str(error), error.__cause__)
    except Exception as error:  # raised by Harbor over this task's files
        if isinstance(error, OSError) and (error.errno in MACHINE_ERRORS or not spec.trials_dir.is_dir()):
            raise
        return failed(task, "task", f"its trial cannot be run: {describe(error)}", error)
    if verdict.problem:
        started = all(trial.outcome is not Outcome.sandbox_error for trial in trials)
        found = faults(requirements, verifier_lacks=any(trial.verifier_lacks for trial in trials))
        verdict.findings = [*found, *verdict.findings] if started else [*verdict.findings, *found]
        if started and (guessed or mutants) and never_solved(trials):
            answers.append(note("solution", "no guesses or mutants were run, since the solution never passed"))
    verdict.findings = sorted([*verdict.findings, *answers], key=lambda finding: _ORDER.index(finding.severity))
    return verdict


def failed(task: TaskRef, category: Category, problem: str, cause: BaseException | None = None) -> Verdict:
    """Return the verdict on a task that was not run."""
    trace = "".join(traceback.format_exception(cause)) if cause is not None else ""
    return Verdict(task=task.name, key=task.key, findings=[bad(category, problem)], trace=trace)


async def _trials(
    task: TaskRef,
    spec: TrialSpec,
    repeats: int,
    cheats: Mapping[str, str],
    guessed: Mapping[str, str],
    mutants: Sequence[str],
    closed: Collection[str],
) -> AsyncIterator[CheckedTrial]:
    """Run the trials of a task; later trials are skipped if no sandbox starts, or if `nop` gets the reward.

    Guesses and mutants are skipped if the solution never passes: they tell nothing until it does.
    """
    oracles: list[CheckedTrial] = []
    for number in range(repeats if has_solution(task.path) else 0):
        oracle = await _run_agent(spec, ORACLE, closed)
        oracles.append(oracle)
        yield oracle
        if oracle.outcome is Outcome.sandbox_error:
            return
        if number == 0 and oracle.reward is None:
            break
    nop = await _run_agent(spec, NOP, closed)
    yield nop
    if nop.reward is None or nop.reward >= TOP_REWARD:
        return
    most, passes = nop.reward, not never_solved(oracles)
    for cheat, script in [*cheats.items(), *(guessed.items() if passes else ())]:
        trial = await _run_agent(spec, cheat, closed, {"agent": CHEATING_AGENT, "agent_kwargs": {"script": script}})
        yield trial
        if trial.reward is not None and trial.reward > most:
            # A second `nop` trial keeps a random verifier from counting as cheated.
            again = await _run_agent(spec, NOP, closed)
            yield again
            most = max(most, again.reward if again.reward is not None else most)
    for mutant in mutants if passes else ():
        kwargs = {"task_dir": str(task.path), "mutant": mutant}
        yield await _run_agent(spec, mutant, closed, {"agent": MUTANT_AGENT, "agent_kwargs": kwargs})


async def _run_agent(
    spec: TrialSpec, agent: str, closed: Collection[str], update: Mapping[str, object] | None = None
) -> CheckedTrial:
    record = await run_trial(spec.model_copy(update=update or {"agent": agent}))
    current = asyncio.current_task()
    if current is not None and current.cancelling():  # Harbor swallows a cancellation while it removes a sandbox
        raise asyncio.CancelledError
    return checked_trial(agent, record, closed)
