"""The text of a new run file: every key with its value and one short reason.

Invariant: a key is written only if its value differs from the schema's default, or if a user is likely to change it.
"""

import glob
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tomlkit

from harbortrainer.commands.chosen_policy import GROUP, ChosenPolicy
from harbortrainer.commands.chosen_tasks import ChosenTasks
from harbortrainer.config.environment_table import environment_entry
from harbortrainer.config.plugin import PLUGIN_ID
from harbortrainer.config.prime_rl_schema import needs_reasoning_parser
from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.doctor.run_file_checks import LARGEST_ERROR
from harbortrainer.runs.display import plural

ENOUGH_TASKS = math.ceil(0.25 / LARGEST_ERROR**2)
"""Held-out tasks that the doctor asks for."""
DOCKER_TRIALS = 24
"""Trials at once in Docker, which has 30 networks by default."""
_ANSWER_SHARE, _LONGEST_ANSWER = 4, 4096
_GROUPS = {"GPU": 16, "CPU": 8}
_STEPS = {"GPU": 100, "CPU": 20}
_EVAL_TRIALS = 4
_TRIALS_PER_WORKER = 16


@dataclass(frozen=True)
class Key:
    """A key of a table, its value, and the reason for the value."""

    name: str
    value: object
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunChoices:
    """Everything that a run file is written from."""

    name: str
    """Name of the run."""
    command: str
    """The command that writes the file."""
    tasks: ChosenTasks
    policy: ChosenPolicy
    on_prime_rl: bool
    num_train_gpus: int
    num_infer_gpus: int
    timeout_multiplier: float
    warmup: bool = False
    """Whether a warm-up makes the policy."""

    @property
    def answer(self) -> int:
        """Max tokens of an answer."""
        if self.policy.needs_plain_agent:
            return self.policy.command
        return min(_LONGEST_ANSWER, self.policy.seq_len // _ANSWER_SHARE)

    @property
    def answer_reason(self) -> str:
        """Why answers have this length."""
        if self.policy.needs_plain_agent:
            return "of one turn, which is one command"
        return "of one turn, so that a long answer costs no whole trial"

    @property
    def groups(self) -> int:
        """Tasks of a step."""
        return min(_GROUPS[self.policy.device], len(self.tasks.train))

    @property
    def inflight(self) -> int:
        """Trials at once: no more than the sampler holds, a step has, or Docker has networks for."""
        networks = DOCKER_TRIALS if environment_entry(self.tasks.sandbox.kind).needs_docker else math.inf
        return max(GROUP, int(min(self.policy.inflight, self.groups * GROUP, networks)))

    @property
    def evaluated(self) -> int:
        """Tasks of an evaluation: held-out ones, or else the training tasks."""
        return min(len(self.tasks.held_out or self.tasks.train), ENOUGH_TASKS)

    @property
    def eval_trials(self) -> int:
        """Trials per evaluated task: an evaluation then costs about as much as a step."""
        return max(1, min(_EVAL_TRIALS, ENOUGH_TASKS // self.evaluated))


def run_file(choices: RunChoices) -> str:
    """Return the run file as TOML with comments."""
    head = [f"# {line}" for line in _summary(choices)]
    tables = [_table(header, keys) for header, keys in _tables(choices)]
    return "\n\n".join(["\n".join(head) + "\n" + tables[0], *tables[1:]]) + "\n"


def file_name(text: str) -> str:
    """Return a name for the run of a source of tasks."""
    last = re.split(r"[/#@]", re.sub(r"(@[0-9a-f]{40,}|#\.?|\.git|/|\.parquet)+$", "", text))[-1]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", last).strip(".-")[:100] or "run"


def _summary(choices: RunChoices) -> Iterator[str]:
    tasks, policy = choices.tasks, choices.policy
    held_out = f"{len(tasks.held_out)} held out" if tasks.held_out else "none held out"
    yield f"{policy.name} learns on {tasks.source}: {plural(len(tasks.train), 'training task')}, {held_out}."
    yield f"Written by: {choices.command}"


def _tables(choices: RunChoices) -> Iterator[tuple[str, Sequence[Key]]]:
    policy, group = choices.policy, GROUP
    yield (
        "",
        [
            Key("max_steps", _STEPS[policy.device], "policy updates; stop earlier with Ctrl-C, go on with --resume"),
            Key("seq_len", policy.seq_len, f"tokens of a trial: {policy.seq_len_reason}"),
        ],
    )
    yield "run", [Key("name", choices.name, "the folder in outputs/; a run with a name can be resumed")]
    if choices.warmup:
        yield "warmup", list(_warmup(choices))
    name = Key("name", "warmup", "the policy that [warmup] makes")
    yield "model", [name if choices.warmup else Key("name", policy.name, "a hub id, or a folder")]
    if choices.on_prime_rl:
        yield from _prime_rl_tables(choices)
    lora = LoraSettings()
    yield (
        "trainer.model.lora",
        [
            Key("rank", lora.rank, "remove the table to train every weight"),
            Key("alpha", lora.alpha, "the update is scaled by alpha / rank"),
        ],
    )
    yield (
        "trainer.loss",
        [
            Key("type", "ipo", "docs/loss.md has the others"),
            Key("ipo_threshold", 0.1, "tokens whose probability moved by more do not train; as published runs"),
            Key("kl_tau", 0.0, "no KL term"),
        ],
    )
    yield (
        "trainer.optim",
        [
            Key("lr", policy.lr, policy.lr_reason),
            Key("weight_decay", 0.0, "an adapter is small already"),
        ],
    )
    yield (
        "orchestrator",
        [
            Key("batch_size", choices.groups * group, f"trials per step: {plural(choices.groups, 'task')} ..."),
            Key("group_size", group, "... of 8 trials, enough for success and failure at rates of 10 to 90 %"),
            Key("max_off_policy_steps", 4 if choices.on_prime_rl else 1, "older trials would teach the wrong thing"),
        ],
    )
    first = [Key("initial_inflight", choices.inflight, "start with all")] if choices.on_prime_rl else []
    yield "orchestrator.concurrency", [*first, Key("max_inflight", choices.inflight, "trials at once; docs/sizing.md")]
    yield from _renderer(policy)
    yield (
        "orchestrator.train.sampling",
        [
            Key("temperature", 1.0, "log-probabilities belong to the model's own distribution"),
            Key("max_completion_tokens", choices.answer, choices.answer_reason),
        ],
    )
    yield from _source(choices, "train")
    yield from _evaluation(choices)
    yield (
        "ckpt",
        [
            Key(
                "interval",
                10 if policy.device == "GPU" else 1,
                "steps between checkpoints; a killed run loses at most these",
            ),
            Key("keep_last", 3, "older ones are deleted"),
        ],
    )


def _warmup(choices: RunChoices) -> Iterator[Key]:
    policy = choices.policy
    yield Key("model", policy.name, "a hub id, or a folder; it learns the solutions of the training tasks")
    yield Key("target", 0.3, "it stops at this success rate, so that rewards differ within a group")
    yield Key("steps", 80, "at most")
    yield Key("batch_size", 8, "solutions per step")
    yield Key("lr", max(1e-4, policy.lr), "of a LoRA")
    yield Key("lora_rank", LoraSettings().rank, "merged at the end; 0 trains every weight")


def _prime_rl_tables(choices: RunChoices) -> Iterator[tuple[str, Sequence[Key]]]:
    yield (
        "deployment",
        [
            Key("num_infer_gpus", choices.num_infer_gpus, "sampling is the slow part, so all other GPUs go there"),
            Key("num_train_gpus", choices.num_train_gpus, "as many as the model needs"),
        ],
    )
    keys = [Key("max_model_len", choices.policy.seq_len, "as seq_len: nothing is sampled that cannot be trained on")]
    if needs_reasoning_parser(choices.policy.name):
        keys.append(Key("reasoning_parser", "qwen3", '"auto" knows no parser for this model'))
    yield "inference.vllm", keys


def _renderer(policy: ChosenPolicy) -> Iterator[tuple[str, Sequence[Key]]]:
    reasons = {
        "name": policy.chat_format.reason,
        "thinking_retention": "reasoning stays in the history, so that a trial is one sample",
        "import_path": "it appends each turn, so that a trial is one sample",
    }
    yield "orchestrator.renderer", [Key(name, value, reasons[name]) for name, value in policy.chat_format.table.items()]


def _source(choices: RunChoices, kind: str) -> Iterator[tuple[str, Sequence[Key]]]:
    """Yield the tables of the training source or the evaluation's, whose trials run alike."""
    source, tasks = f"orchestrator.{kind}.source", choices.tasks
    name = choices.name if kind == "train" else "held-out" if tasks.held_out else "training-tasks"
    yield f"[{source}]", [Key("name", name, "in logs and metrics")]
    yield f"{source}.env.taskset", list(_taskset(choices, kind))
    workers = math.ceil(choices.inflight / _TRIALS_PER_WORKER)
    pool = {"type": "static", "num_workers": workers}
    tables = {
        "serve": [Key("pool", pool, f"processes that run trials, for {_TRIALS_PER_WORKER} trials each")],
        "env.agent": [Key("max_turns", choices.policy.max_turns, choices.policy.max_turns_reason)],
        "env.agent.harness": _harness(choices),
    }
    for table, keys in tables.items():
        yield f"{source}.{table}", keys if kind == "train" else [replace(key, reason="as in training") for key in keys]


def _harness(choices: RunChoices) -> list[Key]:
    tasks = choices.tasks
    if choices.policy.needs_plain_agent:
        reason = "one command per answer; this model is too small for Terminus-2; see docs/agents.md"
        agent = [Key("id", PLUGIN_ID, "Harbor's trial"), Key("agent", "plain", reason)]
    else:
        agent = [Key("id", PLUGIN_ID, "Harbor's trial with Terminus-2 as the agent; see docs/agents.md for others")]
    keys = [
        *agent,
        Key("environment_type", tasks.sandbox.kind, tasks.sandbox.reason),
    ]
    if tasks.sandbox.kwargs:
        keys.append(Key("environment_kwargs", tasks.sandbox.kwargs, "remove it when an image builder is installed"))
    if tasks.trusted:
        keys.append(
            Key("trusted_tasks", list(tasks.trusted), "tasks that may access this machine (docs/check-tasks.md)")
        )
    if choices.timeout_multiplier > 1:
        reason = "the tasks' time limits, times this, hold the longest trial"
        keys.append(Key("timeout_multiplier", choices.timeout_multiplier, reason))
    return keys


def _taskset(choices: RunChoices, kind: str) -> Iterator[Key]:
    tasks = choices.tasks
    yield Key("id", PLUGIN_ID, "tasks in Harbor's format")
    is_folder = tasks.source.kind == "folder"
    reason = "relative to the folder in which you start the run" if is_folder else "pinned: always the same tasks"
    if Path(str(tasks.source)).is_absolute():
        reason = "a folder of tasks"
    yield Key("tasks_dir" if is_folder else "dataset", str(tasks.source), reason)
    if tasks.left_out:
        yield Key(
            "exclude",
            [glob.escape(name) for name in tasks.left_out],
            "they cannot run here, or are not trusted: `harbortrainer tasks check` says why",
        )
    if tasks.unreadable:
        yield Key("skip_bad", True, f"unreadable tasks or duplicates: {len(tasks.unreadable)}")
    reason = f"{plural(tasks.unchecked, 'task')} did not pass `tasks check` yet"
    yield Key("checked_only", tasks.unchecked > 0, reason if tasks.unchecked else "true: only if `tasks check` passed")
    if kind == "eval" and not tasks.held_out:
        yield Key("may_overlap", True, "no task is held out: this measures the training tasks")
    if tasks.split is None:
        return
    side = "train" if kind == "train" or not tasks.held_out else "eval"
    if tasks.saved:
        yield Key("split", side, "the sides that split.json has saved")
        return
    yield Key("split", side, "near copies of a task are on its side")
    yield Key("eval_share", tasks.split.eval_share, f"holds out {plural(len(tasks.held_out), 'task')}")


def _evaluation(choices: RunChoices) -> Iterator[tuple[str, Sequence[Key]]]:
    tasks, evaluated = choices.tasks, choices.evaluated
    error = math.sqrt(0.25 / evaluated)
    keys = [
        Key(
            "interval", 20 if choices.policy.device == "GPU" else 10, "steps; also before the first and after the last"
        ),
        Key(
            "group_size",
            choices.eval_trials,
            f"trials per task; {plural(evaluated, 'task')}: standard error up to {error:.2f}",
        ),
    ]
    if (available := len(tasks.held_out or tasks.train)) > evaluated:
        keys.append(Key("num_examples", evaluated, f"of {available} tasks: enough, and quicker"))
    yield "orchestrator.eval", keys
    yield (
        "orchestrator.eval.sampling",
        [
            Key("temperature", 1.0, "as in training"),
            Key("max_completion_tokens", choices.answer, "as in training"),
        ],
    )
    yield from _source(choices, "eval")


def _table(header: str, keys: Sequence[Key]) -> str:
    """Return a table, with the reasons in one column where they fit, else above their keys."""
    lines = [f"{key.name} = {_value(key.value)}" for key in keys]
    width = max((len(line) for line in lines if len(line) <= _COLUMN), default=0)
    text = [f"[{header}]"] if header else []
    for line, key in zip(lines, keys, strict=True):
        if len(line) > _COLUMN or "\n" in line:
            text += [f"# {key.reason}", line]
        else:
            text.append(f"{line:<{width}}  # {key.reason}")
    return "\n".join(text)


_COLUMN = 48
"""Widest key and value with a reason beside them."""


def _value(value: object) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, float):
        return f"{value:.0e}".replace("e-0", "e-") if 0 < value < 1e-2 else str(value)
    if isinstance(value, list) and len(value) > 1:
        return "[\n" + "".join(f"    {_value(item)},\n" for item in value) + "]"
    return tomlkit.item(value).as_string()
