"""Is a task fit to train on? The oracle must reach the top reward, and doing nothing must not.

Both are real trials in a real sandbox. A verifier that everybody passes, or nobody, teaches nothing and hides its
fault for weeks, so this comes before training. Invariant: a verdict without a `problem` means that both trials ended
as `completed` and their rewards are on the right side of the top.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harbortrainer.tasks.source import TaskRef
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import TrialRecord
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.spec import TrialSpec

TOP_REWARD = 1.0
"""What a solved task gives, by the convention of Harbor's registry."""


@dataclass(frozen=True)
class Verdict:
    """What the two trials of one task said."""

    task: str
    oracle: float | None
    """The oracle's reward; None when its trial gave none."""
    nop: float | None
    """The reward for doing nothing; None when that trial gave none."""
    problem: str
    """What is wrong with the task, empty when nothing is."""


async def check_tasks(
    tasks: Sequence[TaskRef],
    *,
    environment_type: str = "local",
    environment_kwargs: dict[str, Any] | None = None,
    concurrency: int = 2,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Check each task with two trials, `concurrency` tasks at a time, in the order given.

    Args:
        tasks: What to check.
        environment_type: Where the trials run (`local`, `docker`, ...).
        environment_kwargs: Keyword arguments of the environment's class.
        concurrency: How many tasks are checked at once.
        on_verdict: Called with each verdict as it comes.
    """
    gate = asyncio.Semaphore(concurrency)

    async def check(task: TaskRef, trials_dir: Path) -> Verdict:
        spec = TrialSpec(
            task_dir=task.path,
            trials_dir=trials_dir,
            environment_type=environment_type,
            environment_kwargs=environment_kwargs or {},
            keep_trials="none",
        )
        async with gate:
            oracle = await run_trial(spec.model_copy(update={"agent": "oracle"}))
            nop = await run_trial(spec.model_copy(update={"agent": "nop"}))
        verdict = judge(task.name, oracle, nop)
        on_verdict(verdict)
        return verdict

    with tempfile.TemporaryDirectory(prefix="harbortrainer-check-") as folder:
        return list(await asyncio.gather(*(check(task, Path(folder)) for task in tasks)))


def judge(task: str, oracle: TrialRecord, nop: TrialRecord) -> Verdict:
    """The verdict on one task from the records of its two trials."""
    problems = [_failure("oracle", oracle), _failure("nop", nop)]
    if oracle.reward is not None and oracle.reward < TOP_REWARD:
        problems.append(f"the oracle's reward is {oracle.reward:g}, not {TOP_REWARD:g}: solution or verifier is wrong")
    if nop.reward is not None and nop.reward >= TOP_REWARD:
        problems.append(f"doing nothing gives {nop.reward:g}: the verifier passes everybody")
    return Verdict(task, oracle.reward, nop.reward, "; ".join(filter(None, problems)))


def _failure(agent: str, record: TrialRecord) -> str:
    if record.outcome == Outcome.completed:
        return ""
    detail = f" ({record.error.message})" if record.error else ""
    return f"the {agent} trial ended as {record.outcome}{detail}"
