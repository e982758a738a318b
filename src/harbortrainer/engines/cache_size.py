"""How many tokens the sampler's cache holds, and how many a forward pass has.

Contract: the cache holds at least one request of the longest length, and what transformers counts beside it, which it
refuses to go beyond, has room.

A model whose layers do not all attend to everything before them is given masks by transformers: a row for each token of
a forward pass and a column for each that the cache could hold if all of it were one kind of layer's. They take more
than keys and values where there are few of these, so that such a model has few tokens in a forward pass, and a token
of the cache its columns counted.
"""

import torch
from transformers import ContinuousBatchingConfig, PreTrainedConfig, PreTrainedModel

from harbortrainer.engines.batching_internals import SLIDING_ATTENTION, group_layers_by_attn_type
from harbortrainer.engines.device_memory import free_bytes
from harbortrainer.engines.local.sampler.sharing_scheduler import SHARING_SCHEDULER
from harbortrainer.engines.packed_attention import attends_to_all
from harbortrainer.errors import UserError

# Small pages let short prompts share their beginning; transformers shares whole pages only.
PAGE_SIZE = 16
# More requests than this in one forward pass wait for a place.
MAX_REQUESTS = 256
# Of the memory that is free when the engine starts. The learner needs the rest.
_SHARE = {"cpu": 0.15, "cuda": 0.4}
# On a CPU few, so that what decodes does not wait long for what begins; on a GPU as many as keep it busy.
_MAX_BATCH_TOKENS = {"cpu": 512, "cuda": 4096}
_MAX_MASKED = 1024
# On a CPU the cache is the run's memory too: this much, or four requests of the longest length.
_CPU_CACHE_BYTES = 128 * 2**20
# Of what is free, for all that transformers counts by the token of the cache; the rest is for what it counts otherwise.
_COUNTED = 0.8


def batching_config(model: PreTrainedModel, max_model_len: int, planned: int | None = None) -> ContinuousBatchingConfig:
    """Sizes for this model on this machine.

    Args:
        model: On its device.
        max_model_len: Tokens of the longest request.
        planned: Tokens of the cache, where a plan leaves room for others; by default a share of what is free.

    Raises:
        UserError: the cache of one request of `max_model_len` tokens does not fit.
    """
    kind, free = model.device.type, free_bytes(model.device)
    per_token = cache_bytes_per_token(model, kind)
    affordable, tokens = cache_tokens(free, kind, per_token, max_model_len)
    if planned is not None:
        affordable = tokens = min(planned, free // per_token)
    counted = int(_COUNTED * free) // (keys_and_values(model) + _beside(model, kind))
    affordable, tokens = min(affordable, counted), min(tokens, counted)
    if affordable < max_model_len:
        raise UserError(
            f"no memory for a context of {max_model_len} tokens ({per_token * max_model_len / 2**30:.1f} GiB of cache)",
            do=f"lower max_model_len, to at most {affordable}",
        )
    return ContinuousBatchingConfig(
        return_logprobs=True,
        page_size=PAGE_SIZE,
        num_blocks=-(-tokens // PAGE_SIZE) + 1,
        max_batch_tokens=batch_tokens(model.config, kind),
        max_requests_per_batch=MAX_REQUESTS,
        max_memory_percent=1.0,
        scheduler_type=SHARING_SCHEDULER,
        # Shapes change with every batch; graphs and a second set of buffers would only cost memory.
        use_cuda_graph=False,
        use_async_batching=False,
        auto_switch_to_flash=False,
    )


def cache_tokens(free: int, kind: str, per_token: int, max_model_len: int) -> tuple[int, int]:
    """How many tokens the cache may hold, and how many it is given: no more than are of use.

    Args:
        free: Bytes that can be allocated once the model is there.
        kind: Of device, "cpu" or "cuda".
        per_token: Bytes of a token.
        max_model_len: Tokens of the longest request.
    """
    affordable = int(free * _SHARE.get(kind, 0.3)) // per_token
    tokens = min(affordable, MAX_REQUESTS * max_model_len)
    if kind == "cpu":
        tokens = min(tokens, max(4 * max_model_len, _CPU_CACHE_BYTES // per_token))
    return affordable, tokens


def cache_bytes_per_token(model: PreTrainedModel, kind: str) -> int:
    """Bytes of a token in the cache: its keys and values over all layers, and what stands beside them where masks are
    made.

    Args:
        model: On any device.
        kind: Of the device that it is for, "cpu" or "cuda".
    """
    return keys_and_values(model) + (0 if attends_to_all(model.config) else _beside(model, kind))


def keys_and_values(model: PreTrainedModel) -> int:
    """Bytes of a token's keys and values over all layers."""
    config = model.config.get_text_config()
    return 2 * config.num_hidden_layers * kv_heads(config) * head_dim(config) * model.dtype.itemsize


def _beside(model: PreTrainedModel, kind: str) -> int:
    """Bytes that transformers counts for a token of the cache beside its keys and values: its columns of the masks, its
    places in the lists of what a pass reads, and its keys and values as a layer reads them, once for each query head.

    As in `PagedAttentionMemoryHandler`, which counts two masks where there are windows. For our own attention it counts
    what is never made.
    """
    config = model.config.get_text_config()
    layers = group_layers_by_attn_type(config)
    masks = 2 if SLIDING_ATTENTION in layers else 1
    heads = 2 * config.num_attention_heads + kv_heads(config)
    read = heads * head_dim(config) * model.dtype.itemsize + len(layers) * torch.int64.itemsize
    columns = masks * model.dtype.itemsize * batch_tokens(config, kind)
    # If all of the cache were one kind of layer's, it would hold so many times the tokens.
    return (read + columns) * config.num_hidden_layers // min(map(len, layers.values()))


def batch_tokens(config: PreTrainedConfig, kind: str) -> int:
    """Tokens of a forward pass at most."""
    tokens = _MAX_BATCH_TOKENS.get(kind, 512)
    return tokens if attends_to_all(config) else min(tokens, _MAX_MASKED)


def kv_heads(config: PreTrainedConfig) -> int:
    """Heads of the keys."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_dim(config: PreTrainedConfig) -> int:
    """Numbers of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
