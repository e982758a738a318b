"""Is a task fit to train on? The oracle must reach the top reward every time, and doing nothing must not.

All are real trials in a real sandbox. A verifier that everybody passes, or nobody, or that changes its mind, teaches
nothing and hides its fault for weeks, so this comes before training; a reward that can be had by cheating is had in
training. Invariants: one task's fault never ends the check of the others; a task that was changed after its check does
not count as checked, since its key is another one.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from harbortrainer.errors import UserError
from harbortrainer.runs.durable import write_whole
from harbortrainer.sandbox.environment_choice import EnvironmentChoice, chosen
from harbortrainer.sandbox.task_demands import TaskDemands
from harbortrainer.tasks.cheats import CHEATING_AGENT
from harbortrainer.tasks.line_ends import told, windows_scripts
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.unread_keys import unread_keys
from harbortrainer.tasks.verdict import NOP, ORACLE, TOP_REWARD, CheckedTrial, Verdict, checked_trial, judge
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.trial_spec import TrialSpec

CHECKED = Path("outputs") / "checked_tasks.json"
"""Where `harbortrainer tasks check` keeps the keys of the tasks that passed; relative to where a run starts."""


async def check_tasks(
    tasks: Sequence[TaskRef],
    *,
    environment_type: str = "local",
    environment_kwargs: Mapping[str, JsonValue] | None = None,
    repeats: int = 1,
    cheats: Sequence[str] = (),
    concurrency: int = 2,
    keep: Path | None = None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Check each task by trials one after another, `concurrency` tasks at a time; the verdicts come in the order of
    `tasks`.

    Args:
        tasks: What to check.
        environment_type: Where the trials run (`local`, `docker`, `auto`, ...).
        environment_kwargs: Keyword arguments of the environment's class.
        repeats: Trials of the oracle.
        cheats: Names of the cheats that are tried.
        concurrency: How many tasks are checked at once.
        keep: Folder in which Harbor's folders of the trials stay; None removes them.
        on_verdict: Called with each verdict as it comes.
    """
    gate = asyncio.Semaphore(concurrency)

    async def one(task: TaskRef, trials_dir: Path) -> Verdict:
        choice = chosen(task.path, environment_type, environment_kwargs or {})
        spec = TrialSpec(
            task_dir=task.path,
            trials_dir=trials_dir,
            environment_type=choice.kind,
            environment_kwargs=choice.kwargs,
            keep_trials="all",
        )
        demands = TaskDemands(task.path)
        async with gate:
            verdict = _refused(task, demands, spec) or await _verdict(task, demands, spec, repeats, cheats)
        verdict.environment = choice.kind
        verdict.note = "; ".join(filter(None, (verdict.note, *_notes(demands, choice))))
        on_verdict(verdict)
        return verdict

    with tempfile.TemporaryDirectory(prefix="harbortrainer-check-") as folder:
        return await _together(one(task, keep or Path(folder)) for task in tasks)


async def _together[T](work: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """What each returns. The first that fails ends the others, as being cancelled does, and how these fail then is not
    told."""
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


def _notes(demands: TaskDemands, choice: EnvironmentChoice) -> Iterator[str]:
    """What is said of a task's files beside the verdict."""
    if reach := demands.reach(choice.kind):
        yield f"its sandbox is open: {', '.join(reach)}"
    if ports := demands.ports_in_common(choice.kind, choice.kwargs):
        yield f"its trials share the ports {', '.join(map(str, ports))} of this machine"
    if told := demands.told_of_localhost(choice.kind, choice.kwargs, os.environ):
        yield f"its sandbox has a localhost of its own, and is told of this machine's: {', '.join(told)}"
    if keys := unread_keys(demands.config):
        yield f"Harbor passes over {', '.join(keys)}"


def _refused(task: TaskRef, demands: TaskDemands, spec: TrialSpec) -> Verdict | None:
    """The verdict on a task that no trial can be made of here."""
    beyond = demands.beyond(spec.environment_type, spec.environment_kwargs)
    why = [*beyond, *demands.unset(os.environ, solution=has_solution(task.path))]
    if not why:
        return None
    return Verdict(
        task=task.name, key=task.key, problem=f"cannot be played in {spec.environment_type}: {'; '.join(why)}"
    )


async def _verdict(
    task: TaskRef, demands: TaskDemands, spec: TrialSpec, repeats: int, cheats: Sequence[str]
) -> Verdict:
    try:
        verdict = judge(task.name, task.key, [trial async for trial in _trials(task, spec, repeats, cheats)])
    except UserError as error:
        return Verdict(task=task.name, key=task.key, problem=str(error))
    if verdict.problem and (scripts := windows_scripts(task.path, demands.config)):
        verdict.problem += f"; {told(scripts)}"
    return verdict


async def _trials(task: TaskRef, spec: TrialSpec, repeats: int, cheats: Sequence[str]) -> AsyncIterator[CheckedTrial]:
    """What is worth trying: no trial again whose sandbox cannot be, no cheat where nop has the reward already."""
    for number in range(repeats if has_solution(task.path) else 0):
        oracle = await _played(spec, ORACLE)
        yield oracle
        if oracle.outcome is Outcome.sandbox_error:
            return
        if number == 0 and oracle.reward is None:
            break
    nop = await _played(spec, NOP)
    yield nop
    if nop.reward is None or nop.reward >= TOP_REWARD:
        return
    most = nop.reward
    for cheat in cheats:
        trial = await _played(spec, cheat)
        yield trial
        if trial.reward is not None and trial.reward > most:
            # A verifier that throws a coin would seem to be taken in.
            again = await _played(spec, NOP)
            yield again
            most = max(most, again.reward if again.reward is not None else most)


async def _played(spec: TrialSpec, agent: str) -> CheckedTrial:
    cheats = agent not in (ORACLE, NOP)
    said: dict[str, object] = (
        {"agent": CHEATING_AGENT, "agent_kwargs": {"cheat": agent}} if cheats else {"agent": agent}
    )
    record = await run_trial(spec.model_copy(update=said))
    playing = asyncio.current_task()
    if playing is not None and playing.cancelling():  # Harbor passes over what cancels it while it ends a sandbox
        raise asyncio.CancelledError
    return checked_trial(agent, record)


def has_solution(folder: Path) -> bool:
    """Whether a task has a solution that Harbor's oracle can run."""
    return any(any(folder.glob(pattern)) for pattern in ("solution/solve.*", "steps/*/solution/solve.*"))


def passed(environment_type: str | None = None) -> set[str]:
    """Keys of the tasks that passed the check on this machine, in one type of environment or in any."""
    return {key for key, types in checked_in().items() if environment_type is None or environment_type in types}


def remember(tasks: Iterable[TaskRef], environment_type: str = "local") -> None:
    """Add tasks that passed."""
    known = checked_in()
    for task in tasks:
        known[task.key] = sorted({*known.get(task.key, []), environment_type})
    CHECKED.parent.mkdir(parents=True, exist_ok=True)
    write_whole(CHECKED, json.dumps(known, indent=1, sort_keys=True) + "\n")


def checked_in() -> dict[str, list[str]]:
    """Key of each task that passed, and where it did."""
    try:
        known = json.loads(CHECKED.read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return known if isinstance(known, dict) else {key: ["local"] for key in known}
