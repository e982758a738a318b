"""Checks of the policy with its own libraries: model architecture, vocabulary and chat format.

- Architecture: whether the embedded engine can sample from it.
- Vocabulary: whether the model has the tokenizer's tokens.
- Chat format: whether it works with the tokenizer, and whether each turn only appends tokens. The renderers package is
  called as verifiers' client calls it: for a prompt, then for the turn after its completion.

Nothing is downloaded: there is no finding if the files are not on this machine, or a warm-up has yet to create them.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from harbortrainer.config.orchestrator_config import APPENDING_TEMPLATE
from harbortrainer.config.prime_rl_run import PrimeRun
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor.finding import Finding, green, red, yellow
from harbortrainer.doctor.gpus import config_folders, folders_of
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.doctor.model_files import has_tokenizer
from harbortrainer.doctor.pace import turns_of
from harbortrainer.errors import UserError
from harbortrainer.runs.display import loading

if TYPE_CHECKING:
    from renderers.base import Message, Renderer
    from transformers import PreTrainedTokenizerBase


def check_architecture(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that the embedded engine can sample from the model's architecture, and how. Skipped if vLLM samples."""
    run = plan.run
    if not isinstance(run, RunConfig) or run.inference.engine == "vllm":
        return
    name, key = run.starting_model
    folders = config_folders(name) if name else []
    if not folders or find_spec("torch") is None:
        return
    with loading("transformers", "transformers"):
        from harbortrainer.engines.models import load_config, needs_plain_sampling, require_sampling_support

    try:
        config = load_config(folders[0], where=key)
        require_sampling_support(config, name, where=key)
    except UserError as error:
        yield red("model", error.what, error.do, plan.where(error.where))
        return
    if plan.gpus and (reason := needs_plain_sampling(config)):
        what = f"{name} is sampled by transformers' generate, which is slow: {reason}"
        do = 'set engine = "vllm", if vLLM serves this model'
        yield yellow("model", what, do, plan.where("inference.engine"))


_TABLE = "orchestrator.renderer"
_ALL = {"thinking_retention": "all"}
"""Reasoning stays in the history, so that a turn only appends tokens."""
_ANSWER = "Done."


def check_chat_format(plan: LaunchPlan) -> Iterator[Finding]:
    """Check the chat format.

    If it fails, no trial can run. If it cannot append, it costs CPU and splits a trial into several sequences.
    """
    run = plan.run
    if run is None or _has_another_tokenizer(run):
        return
    name = run.model.name
    try:
        tokenizer = local_tokenizer(name)
    except Exception as error:  # noqa: BLE001 - transformers raises many types for a broken tokenizer
        if isinstance(run, RunConfig):  # Prime-RL can load a tokenizer with the model's own code
            what = f"the tokenizer of {name} cannot be read: {_first_line(error)}"
            do = "download tokenizer.json and tokenizer_config.json again"
            yield red("chat format", what, do, plan.where("model.name"))
        return
    if tokenizer is not None:
        yield from _check_vocabulary(plan, run, tokenizer)
        yield _check_format(plan, run, tokenizer)


def _check_vocabulary(
    plan: LaunchPlan, run: RunConfig | PrimeRun, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[Finding]:
    """Check that the model has the tokenizer's tokens: otherwise each trial with one of the others fails."""
    folders = config_folders(run.model.name)
    if not folders or find_spec("torch") is None:
        return
    from harbortrainer.engines.models import load_config, require_vocabulary

    prompt: list[int] = []
    with contextlib.suppress(Exception):  # `_check_format` reports it
        renderer = _renderer(tokenizer, _table(run))
        prompt = [*renderer.render_ids([_user("Begin.")], add_generation_prompt=True), *renderer.get_stop_token_ids()]
    try:
        config = load_config(folders[0], where="model.name")
        require_vocabulary(tokenizer, config, run.model.name, where="model.name", used=prompt)
    except UserError as error:
        yield red("model", error.what, error.do, plan.where(error.where))


def _table(run: RunConfig | PrimeRun) -> dict[str, object]:
    from harbortrainer.environment.renderers_compat import with_chat_format

    named = with_chat_format(run) if isinstance(run, RunConfig) else run
    return {"name": "auto"} | dict(named.orchestrator.renderer)


def _check_format(plan: LaunchPlan, run: RunConfig | PrimeRun, tokenizer: "PreTrainedTokenizerBase") -> Finding:
    """Check the run's chat format with the tokenizer of its trials."""
    table, where = _table(run), plan.where(f"{_TABLE}.name")
    name = run.orchestrator.renderer.get("name", "auto")
    try:
        renderer = _renderer(tokenizer, table)
        appends = _appends(renderer, tokenizer)
    except Exception as error:  # noqa: BLE001 - from a library, a template or the user's class
        what = f"the chat format {name!r} does not work with the tokenizer of {run.model.name}: {_first_line(error)}"
        do = f'set name in [{_TABLE}] to the format of the model\'s family, or to "default" for its own template'
        return red("chat format", what, do, where)
    if appends:
        return green("chat format", f"{name!r} works with the tokenizer, and each turn only appends tokens")
    what = (
        f"the chat format {name!r} cannot append a turn: each turn renders the whole history again "
        f"({_cost(renderer, _max_turns(plan), run.seq_len)}) and starts a new training sequence if tokens differ"
    )
    return yellow("chat format", what, _remedy(tokenizer, table), where)


def _has_another_tokenizer(run: RunConfig | PrimeRun) -> bool:
    """Whether trials are rendered with another tokenizer than the one in the model's folder now."""
    if isinstance(run, RunConfig):
        return run.warmup is not None
    return bool(run.tokenizer or run.orchestrator.tokenizer)


def _max_turns(plan: LaunchPlan) -> int:
    """Max turns over all sources, which share the run's renderer."""
    sources = (key.removesuffix(".env.agent.harness") for key in plan.harnesses)
    return max((turns_of(plan, source) for source in sources), default=1)


def local_tokenizer(model: str) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer of a folder or hub id; None if it is not on this machine. Does not call the hub."""
    if not any(map(has_tokenizer, folders_of(model))):
        return None  # transformers would call the hub for a missing file, `local_files_only` or not
    try:
        with loading("the tokenizer", "transformers"):
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
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {line}" if " " not in line else line


def _appends(renderer: "Renderer", tokenizer: "PreTrainedTokenizerBase") -> bool:
    prompt = renderer.render_ids([_user("Begin.")], add_generation_prompt=True)
    answer = [*tokenizer.encode(_ANSWER, add_special_tokens=False), *renderer.get_stop_token_ids()[:1]]
    return renderer.bridge_to_next_turn(prompt, answer, [_user("Go on.")]) is not None


def _cost(renderer: "Renderer", turns: int, tokens: int) -> str:
    """Measure the CPU seconds of rendering the last turn of the longest trial, as text."""
    answer: Message = {"role": "assistant", "content": _ANSWER}
    turn = [_user("x " * max(1, tokens // (2 * turns))), answer]
    history = [message for _ in range(turns) for message in turn]
    began = time.thread_time()
    renderer.render(history[:-1], add_generation_prompt=True)
    return f"turn {turns} of {turns}: {time.thread_time() - began:.2f} s of CPU at {tokens} tokens"


def _remedy(tokenizer: "PreTrainedTokenizerBase", table: dict[str, object]) -> str:
    own = APPENDING_TEMPLATE["import_path"]
    remedies = (
        (table | _ALL, f'set thinking_retention = "all" in [{_TABLE}]'),
        (APPENDING_TEMPLATE, f'set name = "custom" and import_path = "{own}" in [{_TABLE}]'),
    )
    for other, do in remedies:
        with contextlib.suppress(Exception):  # a remedy that fails is not proposed
            if _appends(_renderer(tokenizer, other), tokenizer):
                return do
    return f"set name in [{_TABLE}] to a chat format of the model's family, if renderers has one"


@dataclass(frozen=True)
class ChatFormat:
    """A table for `[orchestrator.renderer]`, and the reason for it."""

    table: dict[str, object]
    reason: str


def choose_chat_format(model: str) -> ChatFormat:
    """Choose the chat format of a model: one that only appends tokens, if there is one.

    The model's name decides if renderers knows it, else the template of its tokenizer.

    Raises:
        UserError: The tokenizer cannot be read, or has no chat template.
    """
    from harbortrainer.environment.renderers_compat import known_format

    known = known_format(model)
    try:
        tokenizer = local_tokenizer(model)
    except Exception as error:
        do = "download tokenizer.json and tokenizer_config.json again"
        raise UserError(f"the tokenizer of {model} cannot be read: {_first_line(error)}", do=do) from error
    if tokenizer is None:
        name, reason = ({"name": known} | _ALL, "the format of this model") if known else (APPENDING_TEMPLATE, _UNTRIED)
        return ChatFormat(dict(name), reason)
    if not known and not tokenizer.chat_template:
        do = "use an instruction-tuned model"
        raise UserError(f"the tokenizer of {model} has no chat template", do=do)
    for table, reason in _candidates(known, model):
        with contextlib.suppress(Exception):  # a format that fails is not proposed
            renderer = _renderer(tokenizer, table)
            own = known or table is APPENDING_TEMPLATE or _equals_template(renderer, tokenizer)
            if own and _appends(renderer, tokenizer):
                return ChatFormat(dict(table), reason)
    return ChatFormat({"name": known or "default"}, "it changes earlier turns, so each turn starts a new sample")


_UNTRIED = "the model's own template, turn by turn; not tried, since its tokenizer is not here"


def _candidates(known: str | None, model: str) -> Iterator[tuple[Mapping[str, object], str]]:
    """Yield formats that may append, the most specific first, each with the reason to choose it."""
    if known:
        yield {"name": known} | _ALL, "the format of this model"
        yield {"name": known}, "the format of this model"
        return
    yield APPENDING_TEMPLATE, "the model's own template, turn by turn"
    for folder in config_folders(model)[:1]:
        family = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        yield {"name": family} | _ALL, "it renders as the model's own template does"


def _equals_template(renderer: "Renderer", tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a format renders a first prompt and a second one as the tokenizer's own template does."""
    template = _renderer(tokenizer, {"name": "default"})
    conversation: list[Message] = [_user("Begin."), {"role": "assistant", "content": _ANSWER}, _user("Go on.")]
    return all(
        renderer.render_ids(messages, add_generation_prompt=True)
        == template.render_ids(messages, add_generation_prompt=True)
        for messages in (conversation[:1], conversation)
    )
