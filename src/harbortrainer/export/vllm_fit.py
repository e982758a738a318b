"""Whether vLLM can serve an adapter as it stands, by its config and the names of its tensors.

What vLLM refuses is in its `lora/peft_helper.py` and `lora/lora_model.py`; ranks as in `doctor/served_adapter.py`.
A pattern of ranks or alphas it does not refuse: it scales every layer alike, and samples from another policy.
"""

from collections.abc import Iterable

from harbortrainer.config.table import TomlTable
from harbortrainer.doctor.served_adapter import LARGEST_RANK, NOT_SERVED

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, LARGEST_RANK)
"""What `--max-lora-rank` takes; 16 where it is not given."""
PLAIN = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "target_parameters", "lora_bias")


def hindrances(config: TomlTable, tensors: Iterable[str]) -> list[str]:
    """Why vLLM cannot serve the adapter, in words; none when it can.

    Args:
        config: What `adapter_config.json` says.
        tensors: The names of its tensors.
    """
    found = [f"it has {key}" for key in PLAIN if config.get(key)]
    if config.get("bias", "none") != "none":
        found.append("it has biases")
    if (rank := rank_of(config)) > LARGEST_RANK:
        found.append(f"its rank {rank} is above {LARGEST_RANK}")
    outside = {part for name in tensors for part in name.split(".") if part in NOT_SERVED}
    return found + [f"it changes {part}" for part in sorted(outside)]


def rank_of(config: TomlTable) -> int:
    """The adapter's rank."""
    rank = config.get("r")
    return rank if isinstance(rank, int) else 0


def served_rank(rank: int) -> int:
    """The smallest `--max-lora-rank` that serves an adapter of this rank."""
    return next((allowed for allowed in RANKS if allowed >= rank), LARGEST_RANK)
