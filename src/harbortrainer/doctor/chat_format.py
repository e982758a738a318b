"""Whether the run's chat format is that of the policy's tokenizer, and whether a turn only appends in it.

The renderers package is asked as verifiers' client asks it: for a prompt, and for the turn after an answer to it.
Contract: no finding where the tokenizer is not on this machine, which is never asked of the hub, or is yet to be made.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.config.prime_rl_run import PrimeRun
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor.finding import Finding, green, red, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.doctor.model_files import has_tokenizer
from harbortrainer.doctor.pace import turns_of
from harbortrainer.runs.loading import loading

if TYPE_CHECKING:
    from renderers.base import Message, Renderer
    from transformers import PreTrainedTokenizerBase

_TABLE = "orchestrator.renderer"
_ALL = {"thinking_retention": "all"}
_APPENDING = {
    "name": "custom",
    "import_path": "harbortrainer.environment.appending_template.AppendingTemplate",
}
_ANSWER = "Done."


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """A renderer that cannot be made or cannot render stops every trial; one that cannot append costs CPU and rows."""
    run = plan.run
    if run is None or _has_another_tokenizer(run):
        return
    name = run.model.name
    try:
        tokenizer = _tokenizer(name)
    except Exception as error:  # noqa: BLE001 - of a library, about files that are not what it takes them for
        if isinstance(run, RunConfig):  # Prime-RL may be told to run the model's own code for it
            what = f"the tokenizer of {name} cannot be read: {_first_line(error)}"
            do = "fetch tokenizer.json and tokenizer_config.json anew"
            yield red("chat format", what, do, plan.where("model.name"))
        return
    if tokenizer is not None:
        yield _judged(plan, run, tokenizer)


def _judged(plan: LaunchPlan, run: RunConfig | PrimeRun, tokenizer: "PreTrainedTokenizerBase") -> Finding:
    """What the run's chat format does with the tokenizer that trials are rendered with."""
    table, where = {"name": "auto"} | dict(run.orchestrator.renderer), plan.where(f"{_TABLE}.name")
    try:
        renderer = _renderer(tokenizer, table)
        appends = _appends(renderer, tokenizer)
    except Exception as error:  # noqa: BLE001 - of a library, of a template, or of a class that the user wrote
        what = (
            f"the chat format {table['name']!r} does not suit the tokenizer of {run.model.name}: {_first_line(error)}"
        )
        do = f'set name in [{_TABLE}] to the format of the model\'s family, or to "default" for its own template'
        return red("chat format", what, do, where)
    if appends:
        return green(
            "chat format", f"{table['name']!r} suits the tokenizer, and a turn only appends to the ones before"
        )
    what = (
        f"the chat format {table['name']!r} cannot append a turn as this file has it: each renders the whole history "
        f"anew ({_cost(renderer, _most_turns(plan), run.seq_len)}), and begins another sequence where the tokens differ"
    )
    return yellow("chat format", what, _remedy(tokenizer, table), where)


def _has_another_tokenizer(run: RunConfig | PrimeRun) -> bool:
    """Whether the model's own, as it is now, is not the one that trials are rendered with."""
    if isinstance(run, RunConfig):
        return run.warmup is not None
    return bool(run.tokenizer or run.orchestrator.tokenizer)


def _most_turns(plan: LaunchPlan) -> int:
    """Of the longest trial: every source has the run's renderer."""
    sources = (key.removesuffix(".env.agent.harness") for key in plan.harnesses)
    return max((turns_of(plan, source) for source in sources), default=1)


def _tokenizer(model: str) -> "PreTrainedTokenizerBase | None":
    if Path(model).is_dir() and not has_tokenizer(Path(model)):
        return None  # which `model_files` tells
    loading("the tokenizer", "transformers")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (ImportError, OSError):
        return None


def _renderer(tokenizer: "PreTrainedTokenizerBase", table: Mapping[str, object]) -> "Renderer":
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer

    return create_renderer(tokenizer, TypeAdapter(RendererConfig).validate_python(table))


def _user(text: str) -> "Message":
    return {"role": "user", "content": text}


def _first_line(error: Exception) -> str:
    said = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {said}" if " " not in said else said


def _appends(renderer: "Renderer", tokenizer: "PreTrainedTokenizerBase") -> bool:
    prompt = renderer.render_ids([_user("Begin.")], add_generation_prompt=True)
    answer = [*tokenizer.encode(_ANSWER, add_special_tokens=False), *renderer.get_stop_token_ids()[:1]]
    return renderer.bridge_to_next_turn(prompt, answer, [_user("Go on.")]) is not None


def _cost(renderer: "Renderer", turns: int, tokens: int) -> str:
    """What the last turn of the longest trial renders takes of this machine's CPU, in words."""
    answer: Message = {"role": "assistant", "content": _ANSWER}
    turn = [_user("x " * max(1, tokens // (2 * turns))), answer]
    history = [message for _ in range(turns) for message in turn]
    began = time.thread_time()
    renderer.render(history[:-1], add_generation_prompt=True)
    return f"turn {turns} of {turns}: {time.thread_time() - began:.2f} s of CPU at {tokens} tokens"


def _remedy(tokenizer: "PreTrainedTokenizerBase", table: dict[str, object]) -> str:
    remedies = (
        (table | _ALL, f'set thinking_retention = "all" in [{_TABLE}]'),
        (_APPENDING, f'set name = "custom" and import_path = "{_APPENDING["import_path"]}" in [{_TABLE}]'),
    )
    for other, do in remedies:
        with contextlib.suppress(Exception):  # what a class says to a table that nobody wrote is no finding
            if _appends(_renderer(tokenizer, other), tokenizer):
                return do
    return f"set name in [{_TABLE}] to a chat format of the model's family, where renderers has one"
