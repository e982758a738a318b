"""The model card of an export (README.md): description, use, evaluation, tasks and training. Pure functions.

Invariants: every result has its number of tasks, and its interval if one is known. The card contains no local path.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harbortrainer.export.hub_push import BaseModelOrigin
from harbortrainer.export.vllm_fit import served_rank
from harbortrainer.runs.curve import Curve
from harbortrainer.runs.display import plural
from harbortrainer.runs.summary import EvalResult, Gain

TERMINUS_2 = "terminus-2"
"""The agent of `harbortrainer eval` without --agent."""
CURVE_ROWS = 12
"""Most rows of the table of the reward curve."""


@dataclass(frozen=True, kw_only=True)
class CardContent:
    """The contents of a card."""

    name: str
    """Name of the export."""
    step: int
    """Number of updates."""
    engine: str
    """`local` or `prime-rl`."""
    release: str
    """Version of Harbor Trainer."""
    base: BaseModelOrigin
    """The base model."""
    rank: int | None
    """Rank of the LoRA; None after full fine-tuning."""
    merged: bool
    """Whether the export is a whole model."""
    agents: Sequence[str] = ()
    """Harbor agents that the training trials ran with."""
    renderer: str | None = None
    """Name of the renderer that made prompts of the agent's messages."""
    license: str | None = None
    """License that the base model's own card names, as an identifier of the hub; None if it is unknown."""
    quantization: str | None = None
    """Quantization of the base during training."""
    vllm_obstacles: Sequence[str] = ()
    """Reasons why vLLM cannot serve the adapter."""
    tasks: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Origin and number of the tasks, by source."""
    evaluations: Mapping[int, EvalResult] = field(default_factory=dict)
    """The run's evaluations, by step."""
    gain: Gain | None = None
    """Gain of the evaluation at `step` over the run's first one; None if there are not both."""
    reports: Sequence[str] = ()
    """Text of further evaluations of exactly these weights."""
    evaluated_training_tasks: int = 0
    """Number of tasks of the run's evaluations that it also trained on."""
    curve: Curve = field(default_factory=Curve)
    """Reward curve of the run up to this step."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Package versions of the training."""


def model_card(card: CardContent) -> str:
    """Return the card as Markdown, with the hub's metadata header."""
    parts = [_head(card), f"# {card.name}", _result(card), _what(card), _use(card), _base(card)]
    return "\n\n".join([*parts, *_evaluation(card), *_trained_on(card), _config(card)]) + "\n"


def _head(card: CardContent) -> str:
    lines = ["---", f"library_name: {'transformers' if card.merged else 'peft'}", "pipeline_tag: text-generation"]
    if card.base.hub_id:
        lines += [f"base_model: {card.base.hub_id}"]
        lines += [f"base_model_relation: {'finetune' if card.merged else 'adapter'}"]
    lines += [f"license: {card.license or 'unknown'}"]
    tags = ["harbor", "reinforcement-learning", "agent", *(["lora"] if card.rank else [])]
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _result(card: CardContent) -> str:
    kept = _evaluations(card)
    last = kept.get(card.step)
    if last is None:
        return "**Not evaluated on the run's held-out tasks.**"
    first = min(kept)
    before = f"{kept[first].mean_reward:.3f} after step {first}, " if first < card.step else ""
    known = last.low is not None and last.high is not None
    interval = f" (95 % interval {last.low:.3f} to {last.high:.3f})" if known else ""
    name, trained = _evaluated(card), card.evaluated_training_tasks
    on = plural(last.tasks, f"{name} task") if last.tasks else f"{name} tasks"
    gain = f" Gain: {card.gain}." if card.gain else ""
    note = f" {trained} of these tasks were trained on." if trained else ""
    return f"**Mean reward on {on}: {before}{last.mean_reward:.3f} after step {card.step}{interval}.{gain}{note}**"


def _evaluated(card: CardContent) -> str:
    """Return what the tasks of the run's evaluations are."""
    return "evaluation" if card.evaluated_training_tasks else "held-out"


def _what(card: CardContent) -> str:
    kind = f"LoRA of rank {card.rank}" if card.rank else "full fine-tuning"
    form = "merged into the whole model" if card.merged and card.rank else "the whole model" if card.merged else ""
    of = f"{card.base.hub_id or 'a model that is not on the hub'}{f', {form}' if form else ', as a peft adapter'}"
    engine = "Prime-RL" if card.engine == "prime-rl" else "its embedded engine"
    return (
        f"A language-model agent after {card.step} steps of reinforcement learning on [Harbor]"
        f"(https://harborframework.com) tasks: {kind} of {of}. Made by Harbor Trainer {card.release} ({engine})."
        f"{_quantized(card)}"
    )


def _quantized(card: CardContent) -> str:
    if card.quantization is None:
        return ""
    return (
        f" It was trained on the base quantized to {card.quantization} (bitsandbytes), and is exported for the "
        "unquantized base, whose outputs differ. Evaluate it before you rely on it."
    )


def _use(card: CardContent) -> str:
    if card.merged:
        how = [
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'model, tokenizer = AutoModelForCausalLM.from_pretrained("HERE"), AutoTokenizer.from_pretrained("HERE")',
            "```",
            "",
            "`HERE` is this folder or its name on the hub. To serve it, run `vllm serve HERE`.",
            *_as_agent(card),
        ]
        return "\n".join(["## Use", "", *how])
    base = card.base.hub_id or "BASE"
    revision = f', revision="{card.base.commit}"' if card.base.commit else ""
    how = [
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{base}"{revision})',
        'model, tokenizer = PeftModel.from_pretrained(base, "HERE"), AutoTokenizer.from_pretrained("HERE")',
        "```",
        "",
        "`HERE` is this folder or its name on the hub.",
    ]
    if card.vllm_obstacles:
        serve = f"vLLM cannot serve this adapter ({'; '.join(card.vllm_obstacles)}). Export it merged."
    else:
        rank = served_rank(card.rank or 1)
        serve = f"To serve it: `vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules policy=HERE`"
    return "\n".join(["## Use", "", *how, serve, *_as_agent(card)])


def _as_agent(card: CardContent) -> list[str]:
    """Return the lines on the agent and prompt format of training."""
    if not card.agents:
        return []
    named, agent = " and ".join(f"`{name}`" for name in card.agents), card.agents[0]
    rendered = f", with prompts by the renderer `{card.renderer}`" if card.renderer else ""
    option = "" if agent == TERMINUS_2 else f" --agent {agent}"
    return [
        "",
        f"It was trained as the Harbor agent {named}{rendered}. To run it on a folder of Harbor tasks: "
        f"`harbortrainer eval TASKS --model HERE{option}`",
    ]


def _base(card: CardContent) -> str:
    """Return the section on the base model and its license."""
    unknown = "Its license is unknown: read its terms before you share this model."
    terms = f"Its own card names the license `{card.license}`." if card.license else unknown
    if card.base.hub_id:
        commit = f", commit `{card.base.commit}`" if card.base.commit else ""
        return f"## The base model\n\n[{card.base.hub_id}](https://huggingface.co/{card.base.hub_id}){commit}. {terms}"
    rows = "\n".join(f"| `{name}` | `{digest}` |" for name, digest in sorted(card.base.files.items()))
    return (
        f"## The base model\n\nIt is not on the hub. {terms} Its files have these fingerprints (as in a run's "
        f"made_of.json):\n\n| file | fingerprint |\n|---|---|\n{rows}"
    )


def _evaluation(card: CardContent) -> list[str]:
    parts = ["## Evaluation"]
    kept = _evaluations(card)
    if kept:
        shown = sorted({min(kept), max(kept)})
        rows = [f"| {step} | {kept[step].mean_reward:.3f} | {_interval(kept[step])} |" for step in shown]
        head = f"| after step | mean reward of the run's {_evaluated(card)} tasks | 95 % interval |\n|---|---|---|"
        parts.append("\n".join([head, *rows]))
        parts.append(
            "All tasks have equal weight; the interval is a t interval over tasks. Trials that failed for reasons "
            "other than the policy are not counted."
        )
    if kept and card.step not in kept:
        parts.append(f"This policy (after step {card.step}) was not evaluated.")
    parts += [f"```\n{report}\n```" for report in card.reports]
    return parts if len(parts) > 1 else [parts[0], "There is no evaluation up to this step."]


def _evaluations(card: CardContent) -> dict[int, EvalResult]:
    """Return the evaluations up to the card's step that have a reward, by step."""
    known = card.evaluations.items()
    return {step: found for step, found in known if found.mean_reward is not None and step <= card.step}


def _interval(found: EvalResult) -> str:
    trials = plural(found.n, "trial")
    of = f"{plural(found.tasks, 'task')}, {trials}" if found.tasks else trials
    known = found.low is not None and found.high is not None
    return f"{found.low:.3f} to {found.high:.3f} ({of})" if known else f"none over {of}"


def _trained_on(card: CardContent) -> list[str]:
    rows = [f"| {name} | {where} | {count} |" for name, (where, count) in card.tasks.items()]
    parts = ["## Tasks", "| source | from | tasks |\n|---|---|---|\n" + "\n".join(rows)] if rows else []
    if rows:
        parts.append("`tasks.lock.json` has the content hash of each task.")
    if card.curve.train:
        points = card.curve.train
        every = -(-len(points) // CURVE_ROWS)
        chosen = [point for number, point in enumerate(points) if number % every == 0 or number == len(points) - 1]
        table = "\n".join(f"| {step} | {mean:.3f} |" for step, mean in chosen)
        parts += ["## Training", "![reward by step](reward.png)"]
        parts.append(f"| step | mean reward of all training trials |\n|---|---|\n{table}")
    return parts


def _config(card: CardContent) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(card.packages.items()))
    made = f" Trained with {versions}." if versions else ""
    return f"## Config\n\n`run_config.json` is the config of the run.{made}"
