"""The parts of the memory plan: the sampler's cache, its largest forward pass, and out-of-memory errors.

Contract: the cache holds at least one request of the longest length. The buffers that transformers counts beside the
cache, and refuses to exceed, fit too.

A model with layers other than full attention gets masks from transformers. A mask has a row for each token of a
forward pass, and a column for each token that the cache could hold if it belonged to one layer type. Such masks can be
larger than keys and values. Hence these models have fewer tokens in a forward pass, and each cached token counts its
mask columns.

The sizes of a forward pass are formulas. Tests compare the layer part and the sampling part with torch's allocations.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from transformers import ContinuousBatchingConfig, PreTrainedConfig, PreTrainedModel

from harbortrainer.engines.attention.packed import has_only_full_attention
from harbortrainer.engines.batching_internals import SLIDING_ATTENTION, group_layers_by_attn_type
from harbortrainer.engines.local.sampler.sampling_params import LOGITS_AT_ONCE
from harbortrainer.engines.local.sampler.sharing_scheduler import SHARING_SCHEDULER
from harbortrainer.errors import UserError


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch could not allocate, or transformers computed that it could not.

    On a CPU the only sign in torch's error is the name of its allocator.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def explain_out_of_memory(what: str, do: str) -> Generator[None]:
    """Turn an out-of-memory error of the block into a `UserError` with advice.

    Args:
        what: What the memory was for.
        do: The advice.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"not enough memory for {what}", do=do) from error


# Small pages let short prompts share their prefixes, since transformers shares whole pages only.
PAGE_SIZE = 16
# Requests in one forward pass; others wait.
MAX_REQUESTS = 256
# The cache's share of the memory that is free when the engine starts. The learner needs the rest.
_CACHE_SHARE = {"cpu": 0.15, "cuda": 0.4}
# Few on a CPU, so that decoding requests do not wait long for prefills; on a GPU enough to keep it busy.
_MAX_BATCH_TOKENS = {"cpu": 512, "cuda": 4096}
_MAX_MASKED_BATCH_TOKENS = 1024
# Of all short prompts that `generate` computes in one forward pass.
_PLAIN_PROMPTS = {"cpu": 4096, "cuda": 16384}
# A CPU cache uses the machine's memory: at most this much, or four requests of the longest length.
_CPU_CACHE_BYTES = 128 * 2**20
# The share of free memory for buffers that transformers counts per cached token; the rest is for its other buffers.
_PER_TOKEN_SHARE = 0.8


def batching_config(model: PreTrainedModel, max_model_len: int, planned: int | None = None) -> ContinuousBatchingConfig:
    """Choose the engine's sizes for this model on this machine.

    Args:
        model: On its device.
        max_model_len: Tokens of the longest request.
        planned: Tokens of the cache according to a memory plan; by default a share of the free memory.

    Raises:
        UserError: The cache of one request of `max_model_len` tokens does not fit.
    """
    device_type, free = model.device.type, free_bytes(model.device)
    per_token = cache_bytes_per_token(model, device_type)
    affordable, tokens = cache_tokens(free, device_type, per_token, max_model_len, planned)
    limit = int(_PER_TOKEN_SHARE * free) // (kv_bytes_per_token(model) + _overhead_per_token(model, device_type))
    affordable, tokens = min(affordable, limit), min(tokens, limit)
    require_one_request(affordable, per_token, max_model_len)
    return ContinuousBatchingConfig(
        return_logprobs=True,
        page_size=PAGE_SIZE,
        num_blocks=-(-tokens // PAGE_SIZE) + 1,
        max_batch_tokens=batch_tokens(model.config, device_type),
        max_requests_per_batch=MAX_REQUESTS,
        max_memory_percent=1.0,
        scheduler_type=SHARING_SCHEDULER,
        # Shapes change with every batch, so graphs and double buffers would only cost memory.
        use_cuda_graph=False,
        use_async_batching=False,
        auto_switch_to_flash=False,
    )


def require_one_request(affordable: int, per_token: int, max_model_len: int) -> None:
    """Raise `UserError` if the cache of one request of `max_model_len` tokens does not fit."""
    if affordable < max_model_len:
        needed = per_token * max_model_len / 2**30
        raise UserError(
            f"not enough memory for a context of {max_model_len} tokens ({needed:.1f} GiB of cache)",
            do=f"lower max_model_len to {affordable} or less",
        )


@dataclass(frozen=True, kw_only=True)
class CacheBytes:
    """Bytes that the sampler keeps for a request: for each token, and once, such as the state of linear attention."""

    per_token: int
    per_request: int

    def token(self, context: int) -> int:
        """Return the bytes of a token of a request of `context` tokens, with its share of the request's."""
        return max(1, self.per_token - (-self.per_request // context))

    @classmethod
    def from_sizes(cls, sizes: dict[int, int]) -> "CacheBytes":
        """Compute it from the bytes of two lengths. Windows are shorter in truth, so this is an upper bound."""
        (short, first), (long, second) = sorted(sizes.items())
        per_token = -(-(second - first) // (long - short))
        return cls(per_token=per_token, per_request=max(0, first - short * per_token))


@dataclass(frozen=True, kw_only=True)
class PromptBytes:
    """Bytes that `generate` needs beside the cache, for prompts that it computes in one forward pass, and for a step.

    Attributes:
        moments: Bytes per token and per pair of a prompt's tokens that are alive at once. Which of these moments is the
            peak depends on the length.
        per_cached_token: Bytes of a step for each token in the cache, such as a layer's keys once per query head.
    """

    moments: tuple[tuple[int, int], ...]
    per_cached_token: int

    def batch(self, requests: int, tokens: int) -> int:
        """Return the bytes of a batch of prompts, padded to `tokens`."""
        return requests * tokens * max(per_token + per_pair * tokens for per_token, per_pair in self.moments)

    def most(self, context: int, device_type: str, requests: int = 1) -> int:
        """Return the bytes of the largest batch: this many requests of the longest length, or many short ones."""
        short = max(per_token for per_token, _ in self.moments)
        return max(self.batch(requests, context), _PLAIN_PROMPTS.get(device_type, 4096) * short)


PROBE_LENGTHS = 64, 192
"""Lengths at which a forward pass is tried to count its bytes per token."""


@torch.inference_mode()
def measure_plain_cache(model: PreTrainedModel) -> CacheBytes:
    """Measure what `generate` keeps, with a forward pass of each of `PROBE_LENGTHS`."""
    sizes = {}
    for tokens in PROBE_LENGTHS:
        ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
        sizes[tokens] = kept_bytes(model(input_ids=ids, use_cache=True, logits_to_keep=1))
    return CacheBytes.from_sizes(sizes)


def kept_bytes(output: object) -> int:
    """Return the bytes of the cache in a model's output, each storage once."""
    layers = [layer for cache in find_cache(output).values() for layer in getattr(cache, "layers", [])]
    storages = {id(t.untyped_storage()): t.untyped_storage() for t in _tensors(layers)}
    return sum(storage.nbytes() for storage in storages.values())


def find_cache(output: object) -> dict[str, object]:
    """Return the cache in a model's output by its name, which a forward pass takes too; empty if there is none."""
    found = ((name, getattr(output, name, None)) for name in ("cache", "past_key_values", "cache_params"))
    return next(({name: cache} for name, cache in found if cache is not None), {})


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif type(value).__module__.startswith("transformers."):
        yield from _tensors(vars(value))


@dataclass(frozen=True, kw_only=True)
class PlainLimits:
    """The largest batch of `generate`. A request alone always fits."""

    cache: CacheBytes
    cache_bytes: int
    prompt: PromptBytes
    prompt_bytes: int

    @classmethod
    def for_model(
        cls, model: PreTrainedModel, prompt: PromptBytes, max_model_len: int, planned: int | None = None
    ) -> "PlainLimits":
        """Choose them for this model on this machine; other arguments and errors as in `batching_config`."""
        cache, device_type, free = measure_plain_cache(model), model.device.type, free_bytes(model.device)
        per_token = cache.token(max_model_len)
        affordable, tokens = cache_tokens(free, device_type, per_token, max_model_len, planned)
        require_one_request(affordable, per_token, max_model_len)
        longest = 1 if planned is not None else max(1, _PLAIN_PROMPTS.get(device_type, 4096) // max_model_len)
        share = int(free * _CACHE_SHARE.get(device_type, 0.3))
        most = min(prompt.most(max_model_len, device_type, longest), share)
        return cls(cache=cache, cache_bytes=tokens * per_token, prompt=prompt, prompt_bytes=most)

    def fits(self, requests: int, prompt: int, total: int) -> bool:
        """Whether a batch fits.

        Args:
            requests: Their number.
            prompt: Tokens of the longest prompt.
            total: Tokens of the longest request at its end.
        """
        needed = requests * (self.cache.per_request + total * self.cache.per_token)
        in_memory = needed <= self.cache_bytes and self.prompt.batch(requests, prompt) <= self.prompt_bytes
        return requests == 1 or (in_memory and requests <= MAX_REQUESTS)


def cache_tokens(
    free: int, device_type: str, per_token: int, max_model_len: int, planned: int | None = None
) -> tuple[int, int]:
    """Return how many tokens the cache may hold, and how many it gets: no more than are useful.

    Args:
        free: Bytes that can be allocated once the model is loaded.
        device_type: "cpu" or "cuda".
        per_token: Bytes of a token.
        max_model_len: Tokens of the longest request.
        planned: Tokens of the cache according to a memory plan.
    """
    if planned is not None:
        tokens = min(planned, free // per_token)
        return tokens, tokens
    affordable = int(free * _CACHE_SHARE.get(device_type, 0.3)) // per_token
    tokens = min(affordable, MAX_REQUESTS * max_model_len)
    if device_type == "cpu":
        tokens = min(tokens, max(4 * max_model_len, _CPU_CACHE_BYTES // per_token))
    return affordable, tokens


def cache_bytes_per_token(model: PreTrainedModel, device_type: str) -> int:
    """Return the bytes of a cached token: keys and values over all layers, and its share of masks if there are any.

    Args:
        model: On any device.
        device_type: Of the device that will compute, "cpu" or "cuda".
    """
    overhead = 0 if has_only_full_attention(model.config) else _overhead_per_token(model, device_type)
    return kv_bytes_per_token(model) + overhead


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Return the bytes of a token's keys and values over all layers."""
    config = model.config.get_text_config()
    return 2 * config.num_hidden_layers * kv_heads(config) * head_dim(config) * model.dtype.itemsize


def _overhead_per_token(model: PreTrainedModel, device_type: str) -> int:
    """Return the bytes that transformers counts for a cached token in addition to its keys and values.

    They are its mask columns, its entries in the read indices, and its keys and values as a layer reads them, once per
    query head. `PagedAttentionMemoryHandler` uses the same formula, and counts two masks if there are windows. With our
    own attention it overestimates: those buffers are never allocated.
    """
    config = model.config.get_text_config()
    layers = group_layers_by_attn_type(config)
    masks = 2 if SLIDING_ATTENTION in layers else 1
    heads = 2 * config.num_attention_heads + kv_heads(config)
    read = heads * head_dim(config) * model.dtype.itemsize + len(layers) * torch.int64.itemsize
    columns = masks * model.dtype.itemsize * batch_tokens(config, device_type)
    # If the whole cache belonged to one layer type, it would hold this many times as many tokens.
    return (read + columns) * config.num_hidden_layers // min(map(len, layers.values()))


def batch_tokens(config: PreTrainedConfig, device_type: str) -> int:
    """Return the maximum number of tokens in a forward pass."""
    tokens = _MAX_BATCH_TOKENS.get(device_type, 512)
    return tokens if has_only_full_attention(config) else min(tokens, _MAX_MASKED_BATCH_TOKENS)


def kv_heads(config: PreTrainedConfig) -> int:
    """Return the number of key/value heads; the largest if layers differ."""
    return _config_number(config, "num_key_value_heads", "num_attention_heads")


def head_dim(config: PreTrainedConfig) -> int:
    """Return the dimension of a head; the largest if layers differ."""
    return _config_number(config, "head_dim") or config.hidden_size // _config_number(config, "num_attention_heads")


_FLOAT = 4
_TOKEN_INDICES = 4
"""Size of a token's id and position, in numbers of the model's dtype."""
_SAMPLING_BYTES = 64
"""Bytes per logit in a sampling step: float32 and float64 copies, and sorted order and ranks if a request truncates."""


@dataclass(frozen=True, kw_only=True)
class ForwardPass:
    """Bytes that the sampler's largest forward pass needs in addition to the cache.

    Attributes:
        layer: Activations within a layer.
        logits: Logits of all requests.
        sampling: Temporaries of the sampling step.
        per_past_token: Bytes of a token in a request's past: its mask column, unless the cache counts it.
        cache_per_token: Padded copy of a cached token that a layer reads; 0 if the cache counts it.
        prompt: With `generate`, what its prompts need instead of `layer`; otherwise None.
        device_type: "cpu" or "cuda".
    """

    layer: int
    logits: int
    sampling: int
    per_past_token: int
    cache_per_token: int
    prompt: PromptBytes | None
    device_type: str

    @classmethod
    def for_model(cls, model: PreTrainedModel, device_type: str, prompt: PromptBytes | None = None) -> "ForwardPass":
        """Count it for a model on any device, to run on "cpu" or "cuda"; with the prompt's bytes for `generate`."""
        config, size = model.config.get_text_config(), model.dtype.itemsize
        full_attention, tokens = has_only_full_attention(model.config), batch_tokens(model.config, device_type)
        logits = MAX_REQUESTS * config.vocab_size
        read = 2 * kv_bytes_per_token(model) // config.num_hidden_layers if full_attention else 0
        layer_per_token = _peak_width(config) * size + 2 * config.hidden_size * _FLOAT
        return cls(
            layer=0 if prompt else tokens * layer_per_token,
            logits=logits * (size + (_FLOAT if size < _FLOAT else 0)),
            sampling=min(LOGITS_AT_ONCE[device_type], logits) * _SAMPLING_BYTES,
            per_past_token=tokens * size if full_attention and not prompt else 0,
            cache_per_token=prompt.per_cached_token if prompt else read,
            prompt=prompt,
            device_type=device_type,
        )

    def total(self, context: int, cached: int) -> int:
        """Return all bytes, for requests of at most `context` tokens and `cached` tokens in the cache."""
        layer = self.prompt.most(context, self.device_type) if self.prompt else self.layer
        fixed = layer + self.logits + self.sampling
        return fixed + context * self.per_past_token + cached * self.cache_per_token


def _peak_width(config: PreTrainedConfig) -> int:
    """Return how many numbers a token has at once within a layer.

    They are the layer's input, its norm and position, and the larger of two parts. One part is queries, keys, values
    and the attention's output. The other is the feed-forward layer's two halves and their product, for each expert that
    the token is routed to, with the router's scores.
    """
    heads = _config_number(config, "num_attention_heads")
    attention = (3 * heads + 4 * kv_heads(config)) * head_dim(config) if heads else 0
    inner = _config_number(config, "intermediate_size") or 4 * config.hidden_size
    expert = 3 * (_config_number(config, "moe_intermediate_size") or inner) + 2 * config.hidden_size
    router = 2 * _config_number(config, "num_experts", "num_local_experts")
    largest = max(attention, 3 * inner, _config_number(config, "num_experts_per_tok") * (expert + router))
    position = 2 * head_dim(config) if heads else 0
    return 2 * config.hidden_size + position + _TOKEN_INDICES + largest


def _config_number(config: PreTrainedConfig, *names: str) -> int:
    """Return the config's value of the first of these keys that is set; the largest of several, 0 if none is set."""
    for name in names:
        differs = name in (config.per_layer_attributes or ())
        layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)] if differs else [config]
        values = [getattr(layer, name, None) or 0 for layer in layers]
        if found := max(max(value) if isinstance(value, list) else value for value in values):
            return found
    return 0
