"""`harbortrainer rollout`: run one trial and print it live.

Text from a model or a sandbox is hostile: its control characters are escaped before it is printed.
"""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.commands.trial_options import TrialOptions, check_available, load_libraries
from harbortrainer.config.agent_table import OUR_AGENTS
from harbortrainer.config.plugin import HarnessKeys
from harbortrainer.config.task_source import task_source
from harbortrainer.config.trusted_tasks import is_trusted
from harbortrainer.doctor import preflight
from harbortrainer.doctor.task_checks import refuse_unsupported
from harbortrainer.environment.request_check import RunKey
from harbortrainer.errors import UserError
from harbortrainer.evaluation.candidate import NoModel, ServedModel
from harbortrainer.evaluation.eval_rules import EvalRules
from harbortrainer.runs.scratch_folder import scratch_folder
from harbortrainer.tasks.task_errors import inspected
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_store import load_source
from harbortrainer.trials.record import TrialRecord

if TYPE_CHECKING:
    from harbortrainer.trials.trial_spec import TrialSpec

TERMINAL = "Current terminal state:"
"""Separates the instructions from the terminal's content in Terminus-2's first prompt."""

LAST_LINES = 10


class LiveOutput:
    """Print each turn of a trial as it happens.

    Args:
        write_line: Prints a line.
    """

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self._write_line, self._turn = write_line, 0
        self.cut = 0
        """Answers that were cut at their length."""

    def on_prompt(self, text: str) -> None:
        """Print the content of the terminal."""
        self._section("terminal", text.rpartition(TERMINAL)[2])

    def on_answer(self, thinking: str | None, answer: str, *, cut: bool = False) -> None:
        """Print the model's thinking and its completion, parsed if possible."""
        from harbortrainer.trials.agent import split_thinking

        self._turn, self.cut = self._turn + 1, self.cut + cut
        if not thinking:  # a server without a reasoning parser
            thinking, answer = split_thinking(answer)
        if thinking:
            self._section(f"turn {self._turn}, thinking", thinking)
        where = f"turn {self._turn}, model{', cut at its length' * cut}"
        self._section(where, format_answer(answer))

    def _section(self, title: str, text: str) -> None:
        self._write_line(f"--- {title}")
        # Most lines of a terminal are empty.
        self._write_line(re.sub(r"\n{3,}", "\n\n", printable(text.strip())))


def printable(text: str) -> str:
    """Escape the control characters of a text.

    Example:
        >>> printable("a\\x1b[2J\\tb")
        'a\\\\x1b[2J\\tb'
    """
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text)


def format_answer(answer: str) -> str:
    """Format a completion of Terminus-2: analysis, plan and keystrokes. Any other text is returned unchanged."""
    try:
        parsed = json.loads(answer)
        keystrokes = [f"$ {command['keystrokes']!r}" for command in parsed["commands"]]
        lines = [*(str(parsed[key]) for key in ("analysis", "plan") if parsed.get(key)), *keystrokes]
    except (ValueError, KeyError, TypeError):
        return answer
    return "\n".join([*lines, *(["(marks the task as complete)"] if parsed.get("task_complete") is True else [])])


def summary_lines(record: TrialRecord) -> list[str]:
    """Summarize a trial: outcome, reward, tokens, seconds, changed files and error."""
    rewards = ", ".join(f"{name} {value:g}" for name, value in (record.rewards or {}).items())
    took = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in record.timings if value is not None)
    lines = [
        f"outcome   {record.outcome}",
        f"reward    {'none' if record.reward is None else f'{record.reward:g}'}{f'   ({rewards})' if rewards else ''}",
        f"turns     {record.turns} ({record.parse_errors} parse errors)",
        f"tokens    {record.tokens.prompt} prompt, {record.tokens.completion} completion",
        f"seconds   {took}",
        *(f"step      {step.name}: {step.outcome} {step.rewards or ''}" for step in record.steps),
    ]
    if record.error is not None:
        lines.append(f"error     {record.error.type}: {printable(record.error.message)}")
    for file in record.changed_files or ():
        lines.append(f"{file.how:<9} {printable(file.path)} ({file.size} bytes)")
    if (more := record.changed_files_total - len(record.changed_files or ())) > 0:
        lines.append(f"          and {more} more files")
    if record.evidence:
        lines.append(f"evidence  {printable(record.evidence)}")
    return lines


def last_lines(record: TrialRecord, name: str) -> list[str]:
    """Return the last lines of a log file of the trial."""
    files = sorted(Path(record.trial_dir).rglob(name)) if record.trial_dir else []
    lines = [line.rstrip() for file in files for line in file.read_text(errors="replace").split("\n") if line.strip()]
    return [printable(line) for line in lines[-LAST_LINES:]]


class RolloutOrder(TrialOptions):
    """Options of the command, by their names."""

    task: str
    keep: Path | None


def rollout(order: RolloutOrder) -> int:
    """Run one trial of a task and print it; returns 1 when its outcome is not trained on.

    Raises:
        UserError: The task or the model does not exist, or the model server does not respond.
    """
    if order.model is None and order.agent is None:
        do = "pass --model MODEL, --base-url URL with --model NAME, or --agent oracle"
        raise UserError("no model or agent given", where="harbortrainer rollout", do=do)
    order.check()
    task = one_task(order.task)
    candidate = order.candidate()
    rules, _, _ = order.rules(candidate)
    refuse_unsupported([task], *rules.sandboxes, "--environment", rules.trusted_tasks, rules.agent_name)
    preflight.refused_tasks(inspected([task], *rules.sandboxes), "--environment")
    check_available(candidate)
    load_libraries(candidate, "Harbor", "harbor.trial.trial")
    with (
        scratch_folder("rollout") as scratch,
        candidate.serve(rules, RunKey.random()) as served,
    ):
        spec = spec_of(task, rules, None if isinstance(candidate, NoModel) else served, order.keep or scratch)
        print(f"--- task {task.name}\n{task.instruction}", flush=True)
        record, cut = asyncio.run(play(spec))
        print_end(record, cut, order.keep)
    return 0 if record.outcome.trains else 1


def one_task(text: str) -> TaskRef:
    """Load the only task of a folder or other source. Raises `UserError` when there are several."""
    found = load_source(task_source(text), skip=lambda error: None)
    if len(found) > 1:
        names = ", ".join(task.name for task in found[:5])
        do = f"pass one of them, e.g. {text.rstrip('/')}/{found[0].name}"
        raise UserError(f"holds {len(found)} tasks ({names}, ...), not one", where=text, do=do)
    return found[0]


def spec_of(task: TaskRef, rules: EvalRules, served: ServedModel | None, trials_dir: Path) -> "TrialSpec":
    """Build the trial that the rules describe."""
    from harbortrainer.trials.trial_spec import DEFAULT_CONTEXT_LIMIT, ModelEndpoint, TrialSpec

    harness = HarnessKeys.model_validate(rules.agent["harness"])
    llm_kwargs = rules.sampling.model_dump(include={"max_completion_tokens", "top_p"}, exclude_none=True)
    temperature = {} if rules.sampling.temperature is None else {"temperature": rules.sampling.temperature}
    model = None
    if served is not None:
        model = ModelEndpoint.model_validate(
            {
                "name": served.model,
                "base_url": served.client.base_url,
                "api_key": served.api_key,
                "context_limit": harness.context_limit or rules.max_model_len or DEFAULT_CONTEXT_LIMIT,
                "output_limit": rules.sampling.max_completion_tokens,
            }
        )
    return TrialSpec(
        task_dir=task.path,
        task_key=task.key,
        trials_dir=trials_dir,
        agent=harness.agent,
        agent_kwargs=harness.agent_kwargs
        | ({"llm_kwargs": llm_kwargs} | temperature if served and harness.agent in OUR_AGENTS else {}),
        model=model,
        max_turns=rules.agent.get("max_turns") or harness.max_turns,
        environment_type=harness.environment_type,
        environment_kwargs=harness.environment_kwargs,
        trusted=is_trusted(task.name, harness.trusted_tasks),
        timeout_multiplier=harness.timeout_multiplier,
    )


async def play(spec: "TrialSpec") -> "tuple[TrialRecord, int]":
    """Run the trial and print its phases and turns as they happen. Also returns the number of answers that were cut."""
    from harbortrainer.trials.runner import run_trial
    from harbortrainer.trials.turn_listener import TURN_LISTENER

    async def print_event(event: str) -> None:
        print(f"--- {event.replace('-', ' ')}", flush=True)

    TURN_LISTENER.set(live := LiveOutput(lambda line: print(line, flush=True)))
    return await run_trial(spec, on_event=print_event), live.cut


def print_end(record: "TrialRecord", cut: int, keep: Path | None) -> None:
    """Print the logs of solution and verifier, and the summary."""
    for title, name in (("output of the solution", "oracle.txt"), ("output of the verifier", "test-stdout.txt")):
        if lines := last_lines(record, name):
            print("\n".join([f"--- {title}", *lines]))
    print("\n".join(["---", *summary_lines(record)]))
    if cut:
        print(f"cut       {cut} answers at their length; --max-tokens allows longer ones")
    if keep is not None:
        print(f"trial     {record.trial_dir}")
