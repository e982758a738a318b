"""The model of a new run file: its chat format, the longest samples that fit, how many trials run at once, its agent.

Invariant: the lengths are those of the memory plan that the doctor prints. Without a plan (Prime-RL, or a model whose
config is not on this machine) they are the model's own context, bounded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.config.runfile import ModelName
from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.doctor.finding import Level
from harbortrainer.doctor.gpus import config_folders, memory_plan, parameters, usable_memory
from harbortrainer.doctor.model_files import HUB, in_folder, is_hub_id, on_hub
from harbortrainer.doctor.pace import TYPICAL
from harbortrainer.doctor.policy_checks import ChatFormat, choose_chat_format, local_tokenizer
from harbortrainer.engines.engine_choice import Gpu
from harbortrainer.errors import UserError
from harbortrainer.tasks.task_folder import TaskRef
from harbortrainer.trials.plain_format import SYSTEM_PROMPT
from harbortrainer.warmup.tasks_with_solution import SOLUTION

if TYPE_CHECKING:
    from harbortrainer.engines.memory_plan import MemoryPlan

DEFAULT_MODEL: str = ModelName.model_fields["name"].default
GROUP = 8
"""Trials per task: with fewer, most groups of a hard or easy task have equal rewards."""
MAX_SEQ_LEN = 32_768
"""Longest sample that is proposed; a longer one costs time at every turn."""
_SHORT, _SHORTEST = 4096, 2048
"""Lengths below which fewer trials sample at once instead, and below which a model is refused: Terminus-2's prompt and
a few turns need as much."""
_SMALL = 3e8
"""Parameters below which a model writes no JSON for Terminus-2, as seen on SmolLM2-135M-Instruct."""
_MAX_TURNS = 20
_UNPLANNED = 8192
"""Length if the model's config is not on this machine."""
_INFLIGHT = {"GPU": 24, "CPU": 16}
"""Most trials that one device samples for."""
LONGEST_COMMAND, _SHORT_COMMAND = 256, 32
"""Limits of the answer length of a model that writes one command."""
_ROLES, _COMMAND_SEQ_LEN = 64, 256
"""Tokens of a chat format around a prompt, at most. The shortest samples of a model that writes one command."""


@dataclass(frozen=True, kw_only=True)
class ChosenPolicy:
    """The model of a run and what follows from it."""

    name: str
    chat_format: ChatFormat
    device: str
    """What samples: "GPU" or "CPU"."""
    seq_len: int
    seq_len_reason: str
    planned: bool
    """Whether the lengths come from a memory plan. The model then fits."""
    inflight: int
    """Trials at once that the sampler holds, at least a group."""
    size: float | None
    """Number of parameters, if it is known."""
    command: int = LONGEST_COMMAND
    """Most tokens of an answer of the plain agent."""

    @property
    def needs_plain_agent(self) -> bool:
        """Whether the model is too small for Terminus-2, or its context too short for the prompts."""
        return self.seq_len < _SHORTEST or (self.size or _SMALL) < _SMALL

    @property
    def max_turns(self) -> int:
        """Most turns of a trial."""
        return 1 if self.needs_plain_agent else _MAX_TURNS

    @property
    def max_turns_reason(self) -> str:
        """Why trials have this limit."""
        if self.needs_plain_agent:
            return "one command, as a warm-up teaches; with more, the model sees its output"
        return "of the agent; most trials end by themselves before"

    @property
    def lr(self) -> float:
        """Learning rate of a LoRA, rounded to one digit.

        1e-5 for 8 billion parameters. Small models have the rates of the shipped run files: 5e-4 for SmolLM2-135M, and
        2.5e-3 for 0.65 million.
        """
        size = self.size or 8e9
        rate = 5e-4 * (1.35e8 / size) ** 0.3 if size < _SMALL else 1e-5 * (8e9 / size) ** 0.58
        return float(f"{rate:.0e}")

    @property
    def lr_reason(self) -> str:
        """Why the learning rate has this value."""
        if (self.size or _SMALL) < _SMALL:
            return "high, since the model is small: 5e-4 was measured for 135 million parameters"
        return "1e-5 for 8 billion parameters, higher for smaller models"


def choose_policy(
    name: str | None, *, gpus: Sequence[Gpu], on_prime_rl: bool, tasks: Sequence[TaskRef] = ()
) -> ChosenPolicy:
    """Choose the chat format and the lengths of a model that `check_model` accepts.

    Args:
        name: A folder or a hub id; None for the default model.
        gpus: The GPUs of the machine that trains; none for its CPU.
        on_prime_rl: Whether Prime-RL trains.
        tasks: The tasks of the run, whose prompts must fit.

    Raises:
        UserError: It has no usable chat format, or it does not fit.
    """
    model = name or DEFAULT_MODEL
    try:
        chat_format = choose_chat_format(model)
        plan = None if on_prime_rl else _plan(model, gpus)
        seq_len, reason, inflight = (
            _planned_lengths(plan, gpus) if plan else _own_lengths(model, gpus, on_prime_rl=on_prime_rl)
        )
    except UserError as error:
        raise UserError(error.what, where=f"--model {model}", do=error.do) from error
    policy = ChosenPolicy(
        name=model,
        chat_format=chat_format,
        device="GPU" if gpus else "CPU",
        seq_len=seq_len,
        seq_len_reason=reason,
        planned=plan is not None,
        inflight=inflight,
        size=parameters(model),
    )
    return _shortened(policy, plan, tasks) if policy.needs_plain_agent and tasks else policy


def _shortened(policy: ChosenPolicy, plan: "MemoryPlan | None", tasks: Sequence[TaskRef]) -> ChosenPolicy:
    """Return a policy whose samples are as long as the longest prompt and a command need.

    A command gets twice the tokens of the longest solution. Longer samples would take memory and time for nothing.
    """
    prompts = [f"{SYSTEM_PROMPT}\n{task.instruction}" for task in tasks]
    files = [task.path / SOLUTION for task in tasks]
    solutions = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    longest = 2 * _most_tokens(policy.name, solutions) if len(solutions) == len(tasks) else LONGEST_COMMAND
    command = min(max(_SHORT_COMMAND, 8 * math.ceil(longest / 8)), LONGEST_COMMAND)
    needed = _most_tokens(policy.name, prompts) + _ROLES + command
    seq_len = max(_COMMAND_SEQ_LEN, 2 ** math.ceil(math.log2(needed)))
    if seq_len >= policy.seq_len:
        return replace(policy, command=min(command, policy.seq_len // 4))
    return replace(
        policy,
        seq_len=seq_len,
        seq_len_reason=f"the longest prompt and a command of {command} need {needed}",
        command=command,
        inflight=_inflight(plan, seq_len, policy.device) if plan else policy.inflight,
    )


def _most_tokens(model: str, texts: Sequence[str]) -> int:
    """Return the number of tokens of the longest text; an upper estimate if the tokenizer is not on this machine."""
    tokenizer = local_tokenizer(model)
    if tokenizer is None:
        return max(len(text.encode()) for text in texts) // 2
    return max(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)


def check_model(name: str) -> list[str]:
    """Raise `UserError` for a model that does not exist; return a warning if the hub cannot be asked."""
    where = f"--model {name}"
    if not Path(name).is_dir() and not is_hub_id(name):
        raise UserError("no such folder", where=where, do="pass a model folder, or a hub id such as Qwen/Qwen3-0.6B")
    finding = in_folder(Path(name), where) if Path(name).is_dir() else on_hub(name, where)
    if finding.level is Level.RED and finding.about != HUB:
        raise UserError(finding.what, where=where, do=finding.do)
    if finding.level is Level.RED or not config_folders(name):
        do = f"to have them counted, run `hf download {name}`, then init again"
        return [f"warning: {where}: {finding.what}; lengths are estimated: {do}"]
    return []


def _plan(model: str, gpus: Sequence[Gpu]) -> "MemoryPlan | None":
    """Return the memory plan of the embedded engine; None if the model's config or torch is not on this machine."""
    folders = config_folders(model) if find_spec("torch") else []
    return memory_plan(folders[0], LoraSettings(), *usable_memory(gpus)) if folders else None


def _planned_lengths(plan: "MemoryPlan", gpus: Sequence[Gpu]) -> tuple[int, str, int]:
    """Return the sample length, the reason for it, and the number of concurrent trials.

    The length is the longest with which the cache holds a whole group, if that is not too short for Terminus-2.
    """
    if plan.max_length < min(_SHORTEST, plan.model_limit):
        error = plan.memory_error(_SHORTEST, _SHORTEST)
        do = "use a smaller model, a larger GPU (--gpus 1 --gpu-memory GB), or Prime-RL"
        raise UserError(f"does not fit; {error.what}" if error else "does not fit", do=do)
    # The trials of a group have half of the longest length on average.
    longest = plan.longest(math.ceil(GROUP * TYPICAL))
    if longest >= min(_SHORT, plan.model_limit):
        seq_len, reason = _bounded(longest)
        if longest < min(MAX_SEQ_LEN, plan.model_limit):
            reason = f"the cache of {_memory(gpus)} holds a group of such trials"
    else:
        seq_len, reason = min(plan.max_length, _SHORT), f"little fits into {_memory(gpus)}: fewer trials sample at once"
    return seq_len, reason, _inflight(plan, seq_len, "GPU" if gpus else "CPU")


def _inflight(plan: "MemoryPlan", seq_len: int, device: str) -> int:
    """Return the number of concurrent trials whose samples fit."""
    fitting = int(plan.cache(seq_len, seq_len) / (seq_len * TYPICAL))
    return max(GROUP, min(fitting, _INFLIGHT[device]))


def _own_lengths(model: str, gpus: Sequence[Gpu], *, on_prime_rl: bool) -> tuple[int, str, int]:
    """Return the same without a plan: the model's own context on Prime-RL, else a short estimate."""
    if not on_prime_rl:
        return _UNPLANNED, "an estimate: the memory of this model could not be counted", GROUP
    folders = config_folders(model) if find_spec("torch") else []
    context = _own_context(folders[0]) if folders else MAX_SEQ_LEN
    return *_bounded(context), _INFLIGHT["GPU"] * (len(gpus) - 1)


def _bounded(context: int) -> tuple[int, str]:
    """Return a length of at most `MAX_SEQ_LEN`, and the reason for it."""
    if context > MAX_SEQ_LEN:
        return MAX_SEQ_LEN, "longer ones fit, but each turn takes longer"
    return context, "the model's own context"


def _memory(gpus: Sequence[Gpu]) -> str:
    return f"{gpus[0].memory_mib // 1024} GB" if gpus else "this machine's memory"


def _own_context(folder: Path) -> int:
    from harbortrainer.engines.local.sampler.sampled_model import context_limit
    from harbortrainer.engines.models import load_config

    return context_limit(load_config(folder, where="model.name"), None)
