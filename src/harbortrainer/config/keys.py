"""What the embedded engine does with each key of Prime-RL's schema: honour, leave to Prime-RL, or refuse.

Contract: a key is looked up by its dotted path without list indices (`orchestrator.train.source.ratio`); the longest
entry that is the path or a prefix of it decides. What stands in neither table is honoured by `RunConfig`.
Invariant: every path in `prime_rl_keys.txt`, the snapshot of the schema at the pin, has exactly one of the three
fates; a test goes through all of them.
"""

from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """A key whose meaning the embedded engine would change.

    Args:
        do: What the user should do instead.
        harmless: Values that ask for what the embedded engine does anyway.
    """

    do: str
    harmless: tuple[Any, ...] = ()


ELSEWHERE = "remove it, or run with --engine prime-rl"

# Only Prime-RL's own processes use these: where they run, how they talk, what they log, how they save memory.
UNUSED = frozenset(resources.files("harbortrainer.config").joinpath("unused_keys.txt").read_text().split())

TRAIN_EXTRA = {"top_k": -1, "min_p": 0.0, "return_token_ids": True}
"""What Prime-RL itself adds to every training request: sample from the whole distribution, return the ids."""

_TOKENIZER = Refusal("remove it: the embedded engine uses the model's own tokenizer and chat template")
_VISION = Refusal(f"{ELSEWHERE}: the embedded engine trains text models")
_RESUME = Refusal("remove it and pass --resume: the embedded engine goes on from the run's last finished step")
_TRUST = Refusal("remove it: the embedded engine never runs code from a model's repository", (False,))
_OUTPUT = Refusal("remove it and set output_dir and run.name at the top of the file")
_RESTORE = Refusal(f"{ELSEWHERE}: the embedded engine always restores all of a checkpoint", (False,))
_EXTRA_BODY = Refusal(f"{ELSEWHERE}: the embedded sampler takes no further sampling settings", ({}, TRAIN_EXTRA))
_EFFORT = Refusal(f"{ELSEWHERE}: the embedded sampler knows no reasoning effort")
_ALGO = Refusal(f"{ELSEWHERE}: the embedded engine has the group-relative algorithm (type = 'grpo') only")
_LOSS = Refusal(f"{ELSEWHERE}: the embedded engine has the loss of type 'default' only")
_OPTIM = Refusal(f"{ELSEWHERE}: the embedded engine has the optimizer of type 'adamw' only")
_WEIGHTS = Refusal(f"{ELSEWHERE}: the embedded engine runs the model as it is saved")

_ONLY_GRPO = {
    f"{prefix}.{key}": _ALGO
    for prefix in ("orchestrator.algo", "orchestrator.train.source.algo")
    for key in ("decay", "demo_key", "episode_agents", "filter", "renderer", "roles", "teacher", "template")
}

REFUSED: dict[str, Refusal] = {
    "resume": _RESUME,
    "tokenizer": _TOKENIZER,
    "model.vlm": _VISION,
    "ckpt.output_dir": Refusal("remove it: checkpoints are written to the run's folder"),
    "inference.vllm.chat_template": _TOKENIZER,
    "inference.vllm.quantization": _WEIGHTS,
    "inference.vllm.rope_scaling": _WEIGHTS,
    "inference.vllm.trust_remote_code": _TRUST,
    "trainer.ckpt.output_dir": Refusal("remove it: checkpoints are written to the run's folder"),
    "trainer.ckpt.skip_dataloader": _RESTORE,
    "trainer.ckpt.skip_optimizer": _RESTORE,
    "trainer.ckpt.skip_progress": _RESTORE,
    "trainer.ckpt.skip_scheduler": _RESTORE,
    "trainer.data": Refusal("remove it: the embedded engine trains on trials only"),
    "trainer.enable_router_replay": Refusal(ELSEWHERE, (False,)),
    "trainer.loss.import_path": _LOSS,
    "trainer.loss.ipo_threshold": _LOSS,
    "trainer.loss.kwargs": _LOSS,
    "trainer.model.debug": Refusal(ELSEWHERE),
    "trainer.model.freeze_moe_router": Refusal(ELSEWHERE, (False,)),
    "trainer.model.index_cache": _WEIGHTS,
    "trainer.model.lora.modules_to_save": Refusal(f"{ELSEWHERE}: only the adapter is trained", ([],)),
    "trainer.model.moe_router_dtype": _WEIGHTS,
    "trainer.model.quantization": _WEIGHTS,
    "trainer.model.trust_remote_code": _TRUST,
    "trainer.model.vlm": _VISION,
    "trainer.optim.momentum": _OPTIM,
    "trainer.optim.mu": _OPTIM,
    "trainer.optim.nesterov": _OPTIM,
    "trainer.output_dir": _OUTPUT,
    "trainer.resume": _RESUME,
    "trainer.tokenizer": _TOKENIZER,
    "orchestrator.algo.sampling": Refusal(f"{ELSEWHERE}: the policy samples its own trials", ({"source": "policy"},)),
    "orchestrator.ckpt.skip_progress": _RESTORE,
    "orchestrator.eval.retrigger_on_resume": Refusal("remove it: unfinished evaluations are run again", (False,)),
    "orchestrator.eval.sampling.extra_body": _EXTRA_BODY,
    "orchestrator.eval.sampling.reasoning_effort": _EFFORT,
    "orchestrator.eval.source.sampling.extra_body": _EXTRA_BODY,
    "orchestrator.eval.source.sampling.reasoning_effort": _EFFORT,
    "orchestrator.model.trust_remote_code": _TRUST,
    "orchestrator.model.vlm": _VISION,
    "orchestrator.output_dir": _OUTPUT,
    "orchestrator.resume": _RESUME,
    "orchestrator.tasks_per_minute": Refusal(
        "remove it and bound the trials with orchestrator.concurrency.max_inflight"
    ),
    "orchestrator.token_batch_size": Refusal("remove it and set orchestrator.batch_size"),
    "orchestrator.tokenizer": _TOKENIZER,
    "orchestrator.train.sampling.extra_body": _EXTRA_BODY,
    "orchestrator.train.source.algo.sampling": Refusal(
        f"{ELSEWHERE}: the policy samples its own trials", ({"source": "policy"},)
    ),
    "orchestrator.train.source.curriculum": Refusal(f"{ELSEWHERE}: the embedded engine cycles through the tasks"),
    "orchestrator.train.source.sampling.extra_body": _EXTRA_BODY,
    **_ONLY_GRPO,
}

# Keys whose other values belong to Prime-RL alone.
ONLY: dict[str, tuple[tuple[str, ...], Refusal]] = {
    "orchestrator.algo.type": (("grpo",), _ALGO),
    "orchestrator.train.source.algo.type": (("grpo",), _ALGO),
    "trainer.loss.type": (("default",), _LOSS),
    "trainer.optim.type": (("adamw",), _OPTIM),
}

# Settings that Prime-RL lets one write at the top or in a part; the embedded engine reads them at the top.
SHARED = {
    "trainer.model.name": "model.name",
    "orchestrator.model.name": "model.name",
    "inference.vllm.model": "model.name",
    "trainer.max_steps": "max_steps",
    "orchestrator.max_steps": "max_steps",
    "orchestrator.seq_len": "seq_len",
    "trainer.model.seq_len": "seq_len",
    "orchestrator.model.lora.rank": "trainer.model.lora.rank",
    "orchestrator.model.lora.alpha": "trainer.model.lora.alpha",
    **{
        f"{part}.ckpt.{key}": f"ckpt.{key}"
        for part in ("trainer", "orchestrator")
        for key in ("interval", "keep_last", "keep_interval")
    },
}

# Entries under an unused prefix that are honoured all the same.
HONOURED = frozenset({"inference.vllm.max_model_len", "orchestrator.model.client.base_url"})

# Ours alone; Prime-RL must never see them.
OURS = frozenset({"seed", "warmup"})


def longest(path: str, table: Any) -> str | None:
    """The longest entry of `table` that is `path` or a prefix of it."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        entry = ".".join(parts[:end])
        if entry in table:
            return entry
    return None


def fate(path: str) -> str:
    """`"shared"`, `"refused"`, `"unused"` or `"honoured"`; among entries that match, the longest decides."""
    if path in SHARED:
        return "shared"
    if path in HONOURED:
        return "honoured"
    refused, unused = longest(path, REFUSED), longest(path, UNUSED)
    if refused is None and unused is None:
        return "honoured"
    return "refused" if len(refused or "") > len(unused or "") else "unused"
