"""Check whether vLLM can serve an adapter, from its config and the names of its tensors.

The rules come from vLLM's `lora/peft_helper.py` and `lora/lora_model.py`, the largest rank from
`doctor/run_file_checks.py`. A rank or alpha pattern is an obstacle: vLLM accepts it but scales all layers
alike, so it samples from another policy.
"""

from collections.abc import Iterable

from harbortrainer.config.table import TomlTable
from harbortrainer.doctor.run_file_checks import LARGEST_RANK, NOT_SERVED

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, LARGEST_RANK)
"""Values of `--max-lora-rank`; the default is 16."""
PLAIN = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "target_parameters", "lora_bias")


def vllm_obstacles(config: TomlTable, tensors: Iterable[str]) -> list[str]:
    """Return the reasons why vLLM cannot serve the adapter; empty if it can.

    Args:
        config: Contents of `adapter_config.json`.
        tensors: Names of the adapter's tensors.
    """
    found = [f"it has {key}" for key in PLAIN if config.get(key)]
    if config.get("bias", "none") != "none":
        found.append("it has biases")
    if (rank := rank_of(config)) > LARGEST_RANK:
        found.append(f"its rank {rank} is above {LARGEST_RANK}")
    outside = {part for name in tensors for part in name.split(".") if part in NOT_SERVED}
    return found + [f"it changes {part}" for part in sorted(outside)]


def rank_of(config: TomlTable) -> int:
    """Return the adapter's rank."""
    rank = config.get("r")
    return rank if isinstance(rank, int) else 0


def served_rank(rank: int) -> int:
    """Return the smallest `--max-lora-rank` for an adapter of this rank."""
    return next((allowed for allowed in RANKS if allowed >= rank), LARGEST_RANK)
