"""Whether an evaluation can show what training does: its standard error, and whether it asks as training does."""

import math
from collections.abc import Iterator

from harbortrainer.config.prime_rl_run import PrimeRun
from harbortrainer.config.reasoning import thinks_untold
from harbortrainer.doctor.finding import Finding, green, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan

LARGEST_ERROR = 0.05
ABOUT = "evaluation"


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """Each source of an evaluation."""
    for key in plan.envs:
        if key.startswith("orchestrator.eval."):
            yield from error_of_the_mean(plan, key, len(plan.played[f"{key}.taskset"]))
    yield from thinking(plan)


def error_of_the_mean(plan: LaunchPlan, key: str, tasks: int) -> Iterator[Finding]:
    """The standard error of a mean reward between 0 and 1 at worst, the square root of 0.25 / tasks: the trials of one
    task may all end alike, so more trials a task cannot be counted on."""
    most = plan.run.orchestrator.eval if plan.run is not None else None
    source = most.source[int(key.partition("[")[2].partition("]")[0])] if most else None
    asked = getattr(source, "num_examples", -1)
    tasks = min(tasks, asked) if isinstance(asked, int) and asked > 0 else tasks
    if not tasks:
        return
    error = math.sqrt(0.25 / tasks)
    what = f"{tasks} held-out task{'s' if tasks > 1 else ''}: a standard error of up to {error:.2f}"
    if error > LARGEST_ERROR:
        do = f"hold out {math.ceil(0.25 / LARGEST_ERROR**2)} tasks or more to see a change of 0.1"
        yield yellow(ABOUT, what, do, plan.where(f"{key}.taskset"))
    else:
        yield green(ABOUT, what)


def thinking(plan: LaunchPlan) -> Iterator[Finding]:
    """Prime-RL's evaluations ask for chat completions, in which a parser has to tell thinking from the answer."""
    run = plan.run
    if not isinstance(run, PrimeRun) or run.inference is None or run.orchestrator.eval is None:
        return
    if thinks_untold(run.model.name) and run.inference.vllm.reasoning_parser in ("auto", None):
        what = f'evaluations of {run.model.name} get its thinking as a part of the answer: "auto" knows no parser'
        do = 'set [inference.vllm] reasoning_parser = "qwen3"'
        yield yellow(ABOUT, what, do, plan.where("inference.vllm.reasoning_parser"))
