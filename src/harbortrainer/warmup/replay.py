"""Create demonstrations by replaying tasks' solutions through the agent that is taught.

With Terminus-2, a scripted model types solution/solve.sh into the terminal; with `plain`, it answers with its commands
in one line, and if these fail, with the quoted script. Otherwise the trial is a normal Harbor trial in a real sandbox.
Invariant: a demonstration got the top reward from the task's verifier.
"""

import asyncio
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, override

from harbor.environments.base import BaseEnvironment
from harbor.llms.base import BaseLLM, LLMResponse
from harbor.models.agent.context import AgentContext

from harbortrainer.config.agent_table import PLAIN_AGENT, TRAINABLE_TERMINUS
from harbortrainer.config.trusted_tasks import is_trusted, trust_remedy
from harbortrainer.errors import UserError
from harbortrainer.sandbox.environment_types import choose_environment
from harbortrainer.sandbox.task_requirements import TaskRequirements
from harbortrainer.tasks.task_check import TOP_REWARD
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.trials.agent import TrainableTerminus2
from harbortrainer.trials.plain_agent import PlainAgent
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.trial_spec import TrialSpec
from harbortrainer.warmup.demonstrations import CONFIRMED, Demonstration, answer
from harbortrainer.warmup.tasks_with_solution import SOLUTION

WAIT_S = 3.0
"""Seconds to wait for a solution before the screen is read."""
FILE = "demonstration.json"
_CONCURRENCY = 2
"""Number of concurrent trials."""
_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?[ \t]*[\"'\\]?([A-Za-z_]\w*)")
_LEADING_COMMENTS = re.compile(r"\A(?:[ \t]*(?:#.*)?\n)+")
_LINE_END = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
"""Where `str.splitlines` ends a line."""


class ScriptedModel(BaseLLM):
    """A model that returns scripted answers and records its prompts."""

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
    """Terminus-2 with a `ScriptedModel`; writes prompts and answers to `demonstration.json` in its logs.

    Args:
        answers: The answers, turn by turn; the last one repeats.
    """

    def __init__(self, logs_dir: Path, *args: Any, answers: Sequence[str], **kwargs: Any) -> None:
        self._script = ScriptedModel(answers)
        kwargs["model_name"] = "script"
        super().__init__(logs_dir, *args, **kwargs)

    @override
    def make_llm(self) -> BaseLLM:
        return self._script

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await super().run(instruction, environment, context)
        (self.logs_dir / FILE).write_text(json.dumps(self._script.turns))


class ReplayPlain(PlainAgent):
    """The plain agent with scripted answers; writes prompts and answers like `ReplayTerminus2`.

    Args:
        answers: The answers, turn by turn.
    """

    def __init__(self, logs_dir: Path, *, answers: Sequence[str], max_turns: int | None = None, **_: object) -> None:
        super().__init__(logs_dir, max_turns=max_turns, api_base="", model_name="script")
        self._script = ScriptedModel(answers)

    @override
    async def request(self, prompt: str, history: Sequence[Mapping[str, str]]) -> LLMResponse:
        return await self._script.call(prompt)

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await super().run(instruction, environment, context)
        (self.logs_dir / FILE).write_text(json.dumps(self._script.turns))


REPLAYED = {
    TRAINABLE_TERMINUS: "harbortrainer.warmup.replay:ReplayTerminus2",
    PLAIN_AGENT: "harbortrainer.warmup.replay:ReplayPlain",
}
"""Agents that replay answers, by the agent that is taught."""


def answers_of(solution: str, agent: str = TRAINABLE_TERMINUS) -> list[str]:
    """Return the answers of a policy that runs the shell script `solution`."""
    lines = list(_typed_lines(solution))
    if agent == PLAIN_AGENT:
        # The agent's commands run in the task's folder. Where a solution goes elsewhere, its demonstration fails.
        return [" && ".join(line.strip() for line in lines if line.strip() and not line.startswith(("cd ", "#")))]
    script = "\n".join(lines).strip("\n") + "\n"
    return [answer([script], duration=WAIT_S, complete=False), CONFIRMED, CONFIRMED]


def quoted_script(solution: str) -> str:
    """Return one command that runs the shell script `solution`, also if its lines do not work one by one."""
    script = _LEADING_COMMENTS.sub("", "\n".join(_typed_lines(solution))).strip("\n")
    quoted = script.replace("\\", r"\\").replace("'", r"\'")
    return f"bash -c $'{_LINE_END.sub(_escaped, quoted)}'"


def _escaped(sign: re.Match[str]) -> str:
    """Return a line end, which would cut the plain agent's command, as bash reads it in `$'...'`."""
    return r"\n" if sign[0] == "\n" else "".join(rf"\x{byte:02x}" for byte in sign[0].encode())


def _attempts(solution: str, agent: str) -> Iterator[list[str]]:
    """Yield the answers to try, trial by trial, until one reaches the top reward."""
    yield answers_of(solution, agent)
    if agent == PLAIN_AGENT:
        yield [quoted_script(solution)]


def _typed_lines(solution: str) -> Iterator[str]:
    """Yield the lines to type: without shebang and `set`, which a here-document keeps."""
    end = None
    for line in solution.split("\n"):
        if end is None and line.startswith(("#!", "set -")):
            continue
        yield line
        if end is None:
            end = found[1] if (found := _HERE_DOCUMENT.search(line)) else None
        elif line.strip() == end:
            end = None


async def replay(
    tasks: Sequence[TaskRef],
    *,
    environment_type: str,
    environment_kwargs: Mapping[str, object] | None = None,
    agent: str = TRAINABLE_TERMINUS,
    trusted: Sequence[str] = (),
    work_dir: Path,
    report: Callable[[TaskRef, bool], None] = lambda task, solved: None,
) -> list[Demonstration]:
    """Replay the solutions of tasks and return the demonstrations that reach the top reward.

    Trial folders are created below `work_dir` and removed at the end. `report` is called after each trial with its task
    and whether the top reward was reached. Tasks that `trusted` names may access this machine.

    Raises:
        UserError: Another task can access this machine. No trial was started.
    """
    _refuse_exposed(tasks, environment_type, environment_kwargs or {}, trusted)
    gate = asyncio.Semaphore(_CONCURRENCY)

    async def one(task: TaskRef, folder: Path) -> Demonstration | None:
        async with gate:
            turns = await first_solved(task, folder)
        report(task, turns is not None)
        return turns

    async def first_solved(task: TaskRef, folder: Path) -> Demonstration | None:
        try:
            solution = (task.path / SOLUTION).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # an answer is text
            return None
        for answers in _attempts(solution, agent):
            turns = await run_scripted_trial(
                task.path,
                answers,
                folder,
                environment_type,
                environment_kwargs,
                agent=agent,
                trusted=is_trusted(task.name, trusted),
            )
            if turns is not None:
                return turns
        return None

    with tempfile.TemporaryDirectory(prefix="replay-", dir=work_dir) as name:
        found = await asyncio.gather(*(one(task, Path(name)) for task in tasks))
    return [demonstration for demonstration in found if demonstration is not None]


def _refuse_exposed(
    tasks: Sequence[TaskRef], environment_type: str, kwargs: Mapping[str, object], trusted: Sequence[str]
) -> None:
    exposed: dict[str, str] = {}
    for task in tasks:
        kind = choose_environment(task.path, environment_type, kwargs).kind
        if not is_trusted(task.name, trusted) and (found := TaskRequirements(task.path).exposure(kind)):
            exposed[task.name] = "; ".join(found)
    if exposed:
        name, access = next(iter(exposed.items()))
        what = f"sandboxes can access this machine in {len(exposed)} of {len(tasks)} tasks: {name} ({access}), ..."
        raise UserError(what, where="warmup.tasks", do=trust_remedy(list(exposed), "warmup"))


async def run_scripted_trial(
    task_dir: Path,
    answers: Sequence[str],
    folder: Path,
    environment_type: str,
    environment_kwargs: Mapping[str, object] | None = None,
    *,
    agent: str = TRAINABLE_TERMINUS,
    trusted: bool = False,
) -> Demonstration | None:
    """Run one scripted trial and return its demonstration; None without the top reward."""
    spec = TrialSpec(
        task_dir=task_dir,
        trials_dir=folder,
        agent=REPLAYED[agent],
        agent_kwargs={"answers": list(answers), "max_turns": len(answers)},
        environment_type=environment_type,
        environment_kwargs=dict(environment_kwargs or {}),
        trusted=trusted,
        keep_trials="all",
    )
    record = await run_trial(spec)
    if record.reward is None or record.reward < TOP_REWARD or record.trial_dir is None:
        return None
    return _read(Path(record.trial_dir))


def _read(trial_dir: Path) -> Demonstration:
    turns = json.loads(next(trial_dir.rglob(FILE)).read_text())
    return tuple((prompt, reply) for prompt, reply in turns)
