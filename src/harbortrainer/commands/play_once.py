"""`harbortrainer rollout`: one trial, live in the terminal."""

import asyncio
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.commands.check_tasks import Sandboxes
from harbortrainer.commands.evaluate import DEFAULT_CONTEXT, look_at
from harbortrainer.commands.narration import Narration, printed_by, the_end
from harbortrainer.config.agent_table import NARRATED_TERMINUS, TRAINABLE_TERMINUS
from harbortrainer.config.plugin import HarnessKeys
from harbortrainer.config.task_source import task_source
from harbortrainer.doctor import agent_names
from harbortrainer.doctor.demands import refuse
from harbortrainer.errors import UserError
from harbortrainer.evaluation.candidate import LocalModel, NoModel, Served, choose
from harbortrainer.evaluation.play_rules import PlayRules, read_run, run_file
from harbortrainer.runs.loading import loading
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.tasks.task_store import load_source

if TYPE_CHECKING:
    from harbortrainer.trials.record import TrialRecord
    from harbortrainer.trials.trial_spec import TrialSpec


@dataclass(frozen=True, kw_only=True)
class RolloutOrder:
    """What the command line asks for."""

    task: str
    model: str | None = None
    base_url: str | None = None
    api_key_var: str = "OPENAI_API_KEY"
    agent: str | None = None
    environment: str | None = None
    environment_kwarg: list[str] = field(default_factory=list)
    temperature: float | None = None
    max_tokens: int | None = None
    max_turns: int | None = None
    keep: Path | None = None


def rollout(order: RolloutOrder) -> int:
    """Play a task once and show it; 1 when the trial ended in a way that does not train.

    Raises:
        UserError: No such task, no such policy, or a model's server that does not answer.
    """
    if order.model is None and order.agent is None:
        do = "give --model M, --base-url URL --model NAME, or --agent oracle"
        raise UserError("nobody to play", where="harbortrainer rollout", do=do)
    if order.agent is not None:
        agent_names.refuse(order.agent, "--agent")
    task = one_task(order.task)
    candidate = choose(model=order.model, base_url=order.base_url, agent=order.agent, key_var=order.api_key_var)
    file = run_file(order.model if isinstance(candidate, LocalModel) else None, None)
    run = read_run(file)
    kwargs = Sandboxes("", order.environment_kwarg).kwargs
    rules = PlayRules.of(run, environment=order.environment, environment_kwargs=kwargs, agent=order.agent)
    agent_names.refuse(rules.player, f"{file}: env.agent.harness.agent")
    limit = candidate.files.context_limit(DEFAULT_CONTEXT) if isinstance(candidate, LocalModel) else None
    rules = rules.changed(
        temperature=order.temperature,
        max_tokens=order.max_tokens,
        max_turns=order.max_turns,
        max_model_len=None if rules.max_model_len else limit,
    )
    refuse([task], *rules.sandboxes, where="--environment")
    look_at(candidate, rules)
    if isinstance(candidate, LocalModel):
        from harbortrainer.engines.engine_choice import need_extra

        need_extra("torch", "transformers", "peft", "fastapi", "uvicorn")
    loading("Harbor" + (", torch and the model" if isinstance(candidate, LocalModel) else ""), "harbor")
    with tempfile.TemporaryDirectory(prefix="harbortrainer-rollout-") as scratch, candidate.serve(rules) as served:
        spec = spec_of(task, rules, None if isinstance(candidate, NoModel) else served, order.keep or Path(scratch))
        print(f"--- task {task.name}\n{task.instruction}", flush=True)
        record = asyncio.run(play(spec))
        tell_end(record, order.keep)
    return 0 if record.outcome.trains else 1


def one_task(text: str) -> TaskRef:
    """The task that a folder, or another source of tasks, holds. Raises `UserError` when it holds several."""
    found = load_source(task_source(text), skip=lambda error: None)
    if len(found) > 1:
        names = ", ".join(task.name for task in found[:5])
        do = f"name one: {text.rstrip('/')}/{found[0].name}"
        raise UserError(f"{len(found)} tasks ({names}, ...)", where=text, do=do)
    return found[0]


def spec_of(task: TaskRef, rules: PlayRules, served: Served | None, trials_dir: Path) -> "TrialSpec":
    """The trial that the rules describe; an agent of ours tells what it does."""
    from harbortrainer.trials.trial_spec import DEFAULT_CONTEXT_LIMIT, ModelEndpoint, TrialSpec

    harness = HarnessKeys.model_validate(rules.agent["harness"])
    told = rules.sampling.model_dump(include={"max_completion_tokens", "top_p"}, exclude_none=True)
    heat = {} if rules.sampling.temperature is None else {"temperature": rules.sampling.temperature}
    model = None
    if served is not None:
        model = ModelEndpoint.model_validate(
            {
                "name": served.model,
                "base_url": served.client.base_url,
                "api_key": os.environ.get(served.client.api_key_var) or "EMPTY",
                "context_limit": harness.context_limit or rules.max_model_len or DEFAULT_CONTEXT_LIMIT,
                "output_limit": rules.sampling.max_completion_tokens,
            }
        )
    narrated = harness.agent == TRAINABLE_TERMINUS
    return TrialSpec(
        task_dir=task.path,
        task_key=task.key,
        trials_dir=trials_dir,
        agent=NARRATED_TERMINUS if narrated else harness.agent,
        agent_kwargs=harness.agent_kwargs | ({"llm_kwargs": told} | heat if narrated and served else {}),
        model=model,
        max_turns=rules.agent.get("max_turns") or harness.max_turns,
        environment_type=harness.environment_type,
        environment_kwargs=harness.environment_kwargs,
        timeout_multiplier=harness.timeout_multiplier,
    )


async def play(spec: "TrialSpec") -> "TrialRecord":
    """Run the trial, with its phases and turns printed as they come."""
    from harbortrainer.trials.narrator import NARRATOR
    from harbortrainer.trials.runner import run_trial

    async def tell(event: str) -> None:
        print(f"--- {event.replace('-', ' ')}", flush=True)

    NARRATOR.set(Narration(lambda line: print(line, flush=True)))
    return await run_trial(spec, on_event=tell)


def tell_end(record: "TrialRecord", keep: Path | None) -> None:
    """What came of it."""
    for title, name in (("the solution printed", "oracle.txt"), ("the verifier printed", "test-stdout.txt")):
        if lines := printed_by(record, name):
            print("\n".join([f"--- {title}", *lines]))
    print("\n".join(["---", *the_end(record)]))
    if keep is not None:
        print(f"trial     {record.trial_dir}")
