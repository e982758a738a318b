"""Replays a task's own solution through Terminus-2, to get the demonstration that a perfect policy would have.

The trial is real: Harbor's, in a real sandbox, graded by the task's verifier. Only the model is a script, which types
solution/solve.sh into the terminal. Invariant: only what the verifier gave the top reward becomes a demonstration.
"""

import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, override

from harbor.environments.base import BaseEnvironment
from harbor.llms.base import BaseLLM, LLMResponse
from harbor.models.agent.context import AgentContext

from harbortrainer.tasks.task_check import TOP_REWARD
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.trials.agent import TrainableTerminus2
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.trial_spec import TrialSpec
from harbortrainer.warmup.demonstrations import CONFIRMED, Demonstration, answer
from harbortrainer.warmup.solved_tasks import SOLUTION

WAIT_S = 3.0
"""Seconds a solution is given before the screen is read."""
FILE = "demonstration.json"


class Script(BaseLLM):
    """A model that gives written answers and remembers what it was shown."""

    def __init__(self, answers: Sequence[str]) -> None:
        super().__init__()
        self._answers = list(answers)
        self.turns: list[tuple[str, str]] = []

    @override
    async def call(self, prompt: str, **kwargs: object) -> LLMResponse:
        reply = self._answers[min(len(self.turns), len(self._answers) - 1)]
        self.turns.append((prompt, reply))
        return LLMResponse(content=reply)

    @override
    def get_model_context_limit(self) -> int:
        return 1_000_000

    @override
    def get_model_output_limit(self) -> int | None:
        return None


class ReplayTerminus2(TrainableTerminus2):
    """Terminus-2 whose model is a `Script`; writes what it was shown and said to `demonstration.json` in its logs.

    Args:
        answers: The answers, turn by turn; the last one repeats.
    """

    def __init__(self, logs_dir: Path, *args: Any, answers: Sequence[str], **kwargs: Any) -> None:
        self._script = Script(answers)
        kwargs["model_name"] = "script"
        super().__init__(logs_dir, *args, **kwargs)

    @override
    def make_llm(self) -> BaseLLM:
        return self._script

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await super().run(instruction, environment, context)
        (self.logs_dir / FILE).write_text(json.dumps(self._script.turns))


def answers_of(solution: str) -> list[str]:
    """What a policy would answer that types `solution`, a shell script, into its terminal."""
    lines = [line for line in solution.splitlines() if not line.startswith(("#!", "set -"))]
    script = "\n".join(lines).strip("\n") + "\n"
    return [answer([script], duration=WAIT_S, complete=False), CONFIRMED, CONFIRMED]


async def replay(
    tasks: Sequence[TaskRef],
    *,
    environment_type: str,
    environment_kwargs: Mapping[str, object] | None = None,
    work_dir: Path,
    concurrency: int = 2,
    report: Callable[[], None] = lambda: None,
) -> list[Demonstration]:
    """Demonstrations of the tasks whose solution, typed into a terminal, reaches the top reward.

    The trials' folders are made below `work_dir` and removed at the end; `report` is called after each trial.
    """
    gate = asyncio.Semaphore(concurrency)

    async def one(task: TaskRef, folder: Path) -> Demonstration | None:
        async with gate:
            answers = answers_of((task.path / SOLUTION).read_text())
            turns = await play(task.path, answers, folder, environment_type, environment_kwargs)
        report()
        return turns

    with tempfile.TemporaryDirectory(prefix="replay-", dir=work_dir) as name:
        found = await asyncio.gather(*(one(task, Path(name)) for task in tasks))
    return [demonstration for demonstration in found if demonstration is not None]


async def play(
    task_dir: Path,
    answers: Sequence[str],
    folder: Path,
    environment_type: str,
    environment_kwargs: Mapping[str, object] | None = None,
) -> Demonstration | None:
    """One scripted trial: its demonstration, or None when it did not reach the top reward."""
    spec = TrialSpec(
        task_dir=task_dir,
        trials_dir=folder,
        agent="harbortrainer.warmup.replay:ReplayTerminus2",
        agent_kwargs={"answers": list(answers), "max_turns": len(answers)},
        environment_type=environment_type,
        environment_kwargs=dict(environment_kwargs or {}),
        keep_trials="all",
    )
    record = await run_trial(spec)
    if record.reward is None or record.reward < TOP_REWARD or record.trial_dir is None:
        return None
    return _read(Path(record.trial_dir))


def _read(trial_dir: Path) -> Demonstration:
    turns = json.loads(next(trial_dir.rglob(FILE)).read_text())
    return tuple((shown, said) for shown, said in turns)
