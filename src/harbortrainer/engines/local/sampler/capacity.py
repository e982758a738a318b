"""How much the engine takes on at once: pages of the cache, tokens and requests in a forward pass.

Contract: the cache holds at least one request of the longest length, or `UserError` says what is missing.
"""

import psutil
import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel

from harbortrainer.errors import UserError

# Small pages let short prompts share their beginning; transformers shares whole pages only.
PAGE_SIZE = 16
# More requests than this in one forward pass wait for a place.
MAX_REQUESTS = 256
# Of the memory that is free when the engine starts. The learner needs the rest.
_SHARE = {"cpu": 0.15, "cuda": 0.4}
# On a CPU few: the members of a group that come together share no pages before one of them has been prefilled.
_MAX_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
# On a CPU the cache is the run's memory too: this much, or four requests of the longest length.
_CPU_CACHE_BYTES = 128 * 2**20


def batching_config(model: PreTrainedModel, max_model_len: int) -> ContinuousBatchingConfig:
    """Sizes for this model on this machine.

    Raises:
        UserError: the cache of one request of `max_model_len` tokens does not fit.
    """
    per_token = cache_bytes_per_token(model)
    affordable = int(free_bytes(model.device) * _SHARE.get(model.device.type, 0.3)) // per_token
    if affordable < max_model_len:
        raise UserError(
            f"no memory for a context of {max_model_len} tokens ({per_token * max_model_len / 2**30:.1f} GiB of cache)",
            do=f"lower max_model_len, to at most {affordable}",
        )
    tokens = min(affordable, MAX_REQUESTS * max_model_len)
    if model.device.type == "cpu":
        tokens = min(tokens, max(4 * max_model_len, _CPU_CACHE_BYTES // per_token))
    return ContinuousBatchingConfig(
        return_logprobs=True,
        page_size=PAGE_SIZE,
        num_blocks=-(-tokens // PAGE_SIZE) + 1,
        max_batch_tokens=_MAX_BATCH_TOKENS.get(model.device.type, 512),
        max_requests_per_batch=MAX_REQUESTS,
        max_memory_percent=1.0,
        # Shapes change with every batch; graphs and a second set of buffers would only cost memory.
        use_cuda_graph=False,
        use_async_batching=False,
        auto_switch_to_flash=False,
    )


def cache_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of keys and values per token over all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * dim * model.dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
