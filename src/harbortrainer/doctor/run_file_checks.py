"""Checks of run file keys against each other.

- Numbers: context lengths, batch and group sizes, trials in flight.
- ECHO: whether it predicts the messages that show the terminal.
- vLLM: whether it can serve the trained adapter.
- Evaluation: its standard error, whether its trials run as in training, and whether thinking is separated from the
  answer.
"""

import math
from collections.abc import Iterator, Mapping

from harbortrainer.config.algorithm_config import NamedAlgo
from harbortrainer.config.plugin import TRAINABLE_TERMINUS, HarnessKeys, unknown_keys
from harbortrainer.config.prime_rl_run import PrimeRun, sources_of
from harbortrainer.config.prime_rl_schema import needs_reasoning_parser
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.table import lookup
from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.doctor.finding import Finding, green, red, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan

_NUMBERS = "numbers"
NO_GROUP = "group_size is 1: every advantage is 0 and nothing is learned", "set it to 2 or more, e.g. 8"
"""Message and advice for `group_size = 1`."""


def check_plugin_keys(plan: LaunchPlan) -> Iterator[Finding]:
    """Check for keys of our plugin that do not exist. verifiers checks its own keys later, since its import is slow."""
    for key, source in sources_of(plan.run).items() if plan.run else ():
        for error in unknown_keys(source.env, plan.file, f"{key}.env"):
            yield red("keys", error.what, error.do, error.where)


def check_numbers(plan: LaunchPlan) -> Iterator[Finding]:
    """Check seq_len, max_model_len, max_completion_tokens, model_info, batch and group size, and trials in flight."""
    if plan.run is None:
        return
    found = [*lengths(plan), *counts(plan)]
    yield from found
    if not found:
        yield green(_NUMBERS, "seq_len, max_model_len, max_completion_tokens, batch_size and group_size fit together")


def lengths(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that a training sample holds a whole trial and that a completion leaves room for its prompt."""
    assert plan.run is not None
    seq_len, inference = plan.run.seq_len, plan.run.inference
    model_len = inference.vllm.max_model_len if inference else None
    context = model_len or seq_len
    answer = plan.run.orchestrator.train.sampling.max_completion_tokens
    if context > seq_len:
        what = f"max_model_len ({context}) is larger than seq_len ({seq_len}): longer trials are cut before training"
        yield yellow(_NUMBERS, what, "set seq_len to max_model_len", plan.where("seq_len"))
    if answer and answer >= context:
        what = f"max_completion_tokens ({answer}) leaves no room for a prompt in a context of {context}"
        where = plan.where("orchestrator.train.sampling.max_completion_tokens")
        yield red(_NUMBERS, what, f"set it below {context}", where)
    for key, harness in plan.harnesses.items():
        limit = (harness.agent_kwargs.get("model_info") or {}).get("max_input_tokens")
        if limit and int(limit) > context:
            what = f"max_input_tokens of model_info ({limit}) is larger than the model's context ({context})"
            where = plan.where(f"{key}.agent_kwargs.model_info.max_input_tokens")
            yield red(_NUMBERS, what, "remove model_info; the harness sets it", where)


def counts(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that groups fill a batch and that a whole group can be in flight."""
    assert plan.run is not None
    orchestrator = plan.run.orchestrator
    batch, group, inflight = orchestrator.batch_size, orchestrator.group_size, orchestrator.concurrency.max_inflight
    if batch and batch % group:
        what = f"batch_size ({batch}) is not a multiple of group_size ({group})"
        yield red(_NUMBERS, what, "change one of the two", plan.where("orchestrator.batch_size"))
    if inflight is not None and inflight < group:
        what = f"max_inflight ({inflight}) is less than group_size ({group})"
        yield red(_NUMBERS, what, f"set it to {group} or more", plan.where("orchestrator.concurrency.max_inflight"))
    if group == 1:
        yield red(_NUMBERS, *NO_GROUP, plan.where("orchestrator.group_size"))


TERMINUS = frozenset({TRAINABLE_TERMINUS, "terminus-2"})
"""Agents that show the terminal in user messages."""


def check_echo_roles(plan: LaunchPlan) -> Iterator[Finding]:
    """Warn about `algo.type = "echo"` without the role in which Terminus-2 shows the terminal."""
    for key, algo in algorithms(plan):
        if algo.type == "echo" and "user" not in algo.role_weights:
            what = "Terminus-2 shows the terminal in user messages, which ECHO does not predict with these roles"
            yield yellow("algorithm", what, f"set {key}.roles.user = {{ alpha = 0.1 }}", plan.where(f"{key}.roles"))


def algorithms(plan: LaunchPlan) -> Iterator[tuple[str, NamedAlgo]]:
    """Yield each algorithm that trains on trials of Terminus-2, with its dotted key."""
    if plan.run is None:
        return
    default = "orchestrator.algo", plan.run.orchestrator.algo
    found = {}
    for key, source in sources_of(plan.run).items():
        harness = plan.harnesses.get(f"{key}.env.agent.harness")
        if key.startswith("orchestrator.train.") and harness is not None and harness.agent in TERMINUS:
            own = getattr(source, "algo", None)
            name, algo = (f"{key}.algo", own) if own else default
            found[name] = algo
    yield from found.items()


LARGEST_RANK = 512
"""The largest LoRA rank of vLLM (`VALID_VLLM_LORA_RANKS` in Prime-RL's schema at the pin)."""

NOT_SERVED = ("lm_head", "embed_tokens", "wte")


def check_served_adapter(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that vLLM can serve the rank and target modules of `[trainer.model.lora]`."""
    run = plan.run
    if isinstance(run, RunConfig) and run.lora is not None and run.inference.engine == "vllm":
        yield from unservable(plan, run.lora, LARGEST_RANK)
    if isinstance(run, PrimeRun) and run.trainer.model.lora is not None and run.inference is not None:
        yield from unservable(plan, run.trainer.model.lora, run.inference.vllm.max_lora_rank or LARGEST_RANK)


def unservable(plan: LaunchPlan, lora: LoraSettings, max_rank: int) -> Iterator[Finding]:
    """Yield findings on an adapter that vLLM cannot serve. `max_rank` is the largest rank that it accepts."""
    if lora.rank > max_rank:
        what = f"rank {lora.rank} is above the maximum of vLLM here ({max_rank})"
        yield red(
            "adapter", what, "lower it, or raise inference.vllm.max_lora_rank", plan.where("trainer.model.lora.rank")
        )
    outside = [name for name in lora.target_modules if any(part in name for part in NOT_SERVED)]
    if outside:
        what = f"vLLM supports no adapter on {', '.join(outside)}, so it would not sample from the trained policy"
        yield yellow("adapter", what, "remove it from target_modules", plan.where("trainer.model.lora.target_modules"))


LARGEST_ERROR = 0.05
FEW_TASKS = 20
"""Number of held-out tasks below which a run is warned, whatever its tasks: a gain of 0.2 may be noise."""
_EVALUATION = "evaluation"


def check_evaluation_size(plan: LaunchPlan) -> Iterator[Finding]:
    """Check the size of each evaluation source, and how thinking is parsed."""
    for key in plan.envs:
        if key.startswith("orchestrator.eval."):
            yield from evaluation_error(plan, key, len(plan.tasks[f"{key}.taskset"]))
    yield from unparsed_thinking(plan)


def evaluation_error(plan: LaunchPlan, key: str, tasks: int) -> Iterator[Finding]:
    """Check the worst-case standard error of an evaluation's mean reward, sqrt(0.25 / tasks).

    More trials per task need not lower it: the trials of one task may all get the same reward. It is a warning only
    where a key of the run file leaves out tasks, or where the tasks are few.
    """
    table = plan.run.orchestrator.eval if plan.run is not None else None
    source = table.source[int(key.partition("[")[2].partition("]")[0])] if table else None
    num_examples = getattr(source, "num_examples", -1)
    taskset, remedy = plan.tasksets[f"{key}.taskset"], ""
    if isinstance(num_examples, int) and 0 < num_examples < tasks:
        tasks, remedy = num_examples, "raise num_examples"
    elif taskset.split == "eval":
        remedy = "raise eval_share"
    if not tasks:
        return
    error = math.sqrt(0.25 / tasks)
    count, spread = f"{tasks} held-out task{'s' if tasks > 1 else ''}", f"standard error up to {error:.2f}"
    noise = f": differences under about {2 * error:.1g} may be noise ({spread})"
    if error <= LARGEST_ERROR:
        yield green(_EVALUATION, f"{count} ({spread})")
    elif remedy or tasks < FEW_TASKS:
        do = f"{remedy or 'hold out more tasks'}; {math.ceil(0.25 / LARGEST_ERROR**2)} measure differences of 0.1"
        yield yellow(_EVALUATION, f"only {count}{noise}", do, plan.where(f"{key}.taskset"))
    else:
        yield green(_EVALUATION, f"{count}{noise}")


REWARD_KEYS = HarnessKeys.model_fields.keys() - {
    *("id", "capture", "vllm_base_url", "model_name"),
    *("keep_trials", "keep_trials_mb", "trials_dir", "trusted_tasks"),
    *("n_parallel_envs", "starts_per_s", "stall_factor", "stall_min_s"),
}
"""Keys of the harness that affect a trial's reward."""


def check_same_trials(plan: LaunchPlan) -> Iterator[Finding]:
    """Warn about keys that make the trials of an evaluation differ from those of the most similar training source.

    Prime-RL's schema has an `env` table per source and no shared one, so a run file repeats these keys.
    """
    trials = {key: dict(_trial_settings(plan, key)) for key in plan.envs}
    trained = [settings for key, settings in trials.items() if key.startswith("orchestrator.train.") and settings]
    for key, own in trials.items():
        if key.startswith("orchestrator.eval.") and own and trained:
            for name in min((_differences(own, other) for other in trained), key=len):
                what = "differs from training, so the evaluation measures other trials than it trains on"
                yield yellow(_EVALUATION, what, "set both to the same value", plan.where(f"{key}.{name}"))


def _trial_settings(plan: LaunchPlan, key: str) -> Iterator[tuple[str, object]]:
    """Yield the keys of an `env` table that affect a trial's reward; none for another plugin's harness."""
    harness = plan.envs[key].agent.harness
    if plan.run is not None and harness is not None:
        yield "agent.max_turns", lookup(sources_of(plan.run)[key.removesuffix(".env")].env, "agent.max_turns")
        for name, value in harness.model_dump(include=set(REWARD_KEYS)).items():
            inner = value.items() if isinstance(value, dict) else ()
            yield from ((f"agent.harness.{name}.{at}", one) for at, one in inner)
            if not isinstance(value, dict):
                yield f"agent.harness.{name}", value


def _differences(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]


def unparsed_thinking(plan: LaunchPlan) -> Iterator[Finding]:
    """Check that Prime-RL's evaluations, which use chat completions, have a parser for thinking."""
    run = plan.run
    if not isinstance(run, PrimeRun) or run.inference is None or run.orchestrator.eval is None:
        return
    if needs_reasoning_parser(run.model.name) and run.inference.vllm.reasoning_parser in ("auto", None):
        what = f'in evaluations, thinking of {run.model.name} stays in the answer: "auto" finds no parser for it'
        do = 'set [inference.vllm] reasoning_parser = "qwen3"'
        yield yellow(_EVALUATION, what, do, plan.where("inference.vllm.reasoning_parser"))
