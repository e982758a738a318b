"""Counts a run's memory before anything is loaded.

The engine's own code builds the model on torch's meta device, so weights, adapter and cache are exact. Activations
saved for the backward pass are counted with fake tensors, at two lengths, since they grow linearly with the tokens.
Masks grow with the square of a sample's length and are counted by formula. Only models with layers other than full
attention have them.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from harbortrainer.config.runfile import Quantization
from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.engines.attention.packed import PACKED_ATTENTION, has_only_full_attention
from harbortrainer.engines.local.learner.policies import lora_config
from harbortrainer.engines.local.learner.trained_policy import recompute_activations
from harbortrainer.engines.local.sampler.sampled_model import context_limit, resolve_dtype
from harbortrainer.engines.memory_parts import (
    PROBE_LENGTHS,
    CacheBytes,
    ForwardPass,
    cache_bytes_per_token,
    kept_bytes,
)
from harbortrainer.engines.memory_plan import EXTRA_VERSIONS, MemoryPlan
from harbortrainer.engines.models import (
    build_meta_model,
    load_config,
    needs_plain_sampling,
    require_sampling_support,
)
from harbortrainer.engines.peft_internals import adapter_weights, inject_for_training
from harbortrainer.engines.quantized_base import largest_layer, quantize
from harbortrainer.private_apis import PrivateApi

PRIVATE_APIS = PrivateApi("torch", "2.15", __name__, ("torch._subclasses.fake_tensor:FakeTensorMode",))
PRIVATE_APIS.check()

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 (not before the check)

ADAPTER_COPIES = 3
"""Adapters in the base's dtype: the learner's, and two versions in the sampler. Requests of still older versions keep
one more each, which is not counted."""
BOOLEAN_MASKS = 2
"""Boolean masks, one per layer type. Each layer makes a numeric copy of its own, and saves it."""
FLOAT_BYTES = 4
"""Bytes of a float32. Gradients, AdamW's two moments and master weights are float32."""
_COUNTED_LAYERS = 4
_UNMASKED_ATTENTION = "sdpa without mask"


def plan_memory(
    model: Path,
    lora: LoraSettings | None,
    *,
    device_type: str,
    capacity: int,
    quantization: Quantization | None = None,
    off_policy: int = 8,
    dtype: str = "auto",
) -> MemoryPlan:
    """Plan the memory of a run. Of the model's folder only the config is read.

    Args:
        lora: None for full fine-tuning.
        device_type: "cpu" or "cuda"; the device need not exist here.
        capacity: Bytes available.
        quantization: Of the base's linear layers.
        off_policy: `max_off_policy_steps`.
        dtype: Of the base, as `inference.vllm.dtype`.

    Raises:
        UserError: The config is unreadable or its architecture unsupported, no linear layer matches
            lora.target_modules or can be quantized, or the quantization library is missing. `where` is the run's key.
        RuntimeError: The forward pass depends on tensor values, such as the choice of experts, and cannot run on fake
            tensors.
    """
    resolved = resolve_dtype(dtype, torch.device(device_type))
    base, weights = build_without_weights(model, lora, resolved, quantization)
    text = base.config.get_text_config()
    saved, recomputed, masked_layers = saved_bytes_per_token(base), 0, text.num_hidden_layers
    if device_type != "cpu":
        recompute_activations(base)
        saved, recomputed, masked_layers = saved_bytes_per_token(base), saved // text.num_hidden_layers, 1
    full_attention = has_only_full_attention(base.config)
    if needs_plain_sampling(base.config):
        kept = count_plain_cache(base)
    else:
        kept = CacheBytes(per_token=cache_bytes_per_token(base, device_type), per_request=0)
    return MemoryPlan(
        device_type=device_type,
        capacity=capacity,
        weights=(2 if lora is None else 1) * weights + 2 * resolved.itemsize * largest_layer(base),
        trained=full_training_bytes(base) if lora is None else adapter_training_bytes(base),
        version=weights if lora is None else 0,
        versions=off_policy + 1 + EXTRA_VERSIONS,
        cache_bytes=kept,
        forward=ForwardPass.for_model(base, device_type),
        saved_per_token=saved,
        recomputed_per_token=recomputed,
        mask_per_pair=0 if full_attention else BOOLEAN_MASKS + masked_layers * resolved.itemsize,
        vocab=text.vocab_size,
        model_limit=context_limit(base.config, None),
    )


def full_training_bytes(model: nn.Module) -> int:
    """Return the bytes that training every weight adds to the model.

    They include two gradients of the largest weight, which are added up if it is tied.
    """
    weights = list(model.parameters())
    largest = max(weight.nbytes for weight in weights)
    return sum(FLOAT_BYTES * training_floats(weight) * weight.numel() for weight in weights) + 2 * largest


def adapter_training_bytes(model: nn.Module) -> int:
    """Return the bytes of the adapter's copies on both sides and of its training state."""
    weights = list(adapter_weights(model, "default").values())
    return ADAPTER_COPIES * total_bytes(weights) + sum(FLOAT_BYTES * training_floats(w) * w.numel() for w in weights)


def training_floats(weight: Tensor) -> int:
    """Return the float32 numbers per element: gradient, two moments and, below float32, a master."""
    return 3 if weight.dtype is torch.float32 else 4


def build_without_weights(
    model: Path, lora: LoraSettings | None, dtype: torch.dtype, quantization: Quantization | None = None
) -> tuple[PreTrainedModel, int]:
    """Build the base on the meta device, with an adapter or with every weight trainable; raises like `plan_memory`.

    Returns:
        The base, and its bytes without the adapter.
    """
    require_sampling_support(load_config(model, where="model.name"), str(model), where="model.name")
    base = build_meta_model(model, dtype, where="model.name", attention=_attention)
    if quantization is not None:
        quantize(base, quantization, torch.device("meta"))
    weights = total_bytes(base.parameters())
    if lora is None:
        base.requires_grad_(True).eval()
        return base, weights
    with torch.device("meta"):
        adapted, _ = inject_for_training(base, lora_config(base, lora, base.name_or_path or ""))
    adapted.eval()
    return base, weights


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def saved_bytes_per_token(base: PreTrainedModel) -> int:
    """Return the bytes that a token of a micro batch saves in the decoder for the backward pass.

    The count is for a CPU; a GPU's attention saves the same.

    Args:
        base: On torch's meta device; trained weights require gradients.
    """
    short, long = (_saved_bytes_of(base, tokens) for tokens in PROBE_LENGTHS)
    return -(-(long - short) // (PROBE_LENGTHS[1] - PROBE_LENGTHS[0]))


def _saved_bytes_of(base: PreTrainedModel, tokens: int) -> int:
    """Return the bytes that a sample saves. Of many equal layers only two are counted, which is much faster."""
    decoder: nn.Module = base.get_decoder()
    text = base.config.get_text_config()
    count, attention = text.num_hidden_layers, {*(getattr(text, "layer_types", None) or ())}
    found = [(name, layers) for name, layers in decoder.named_children() if isinstance(layers, nn.ModuleList)]
    are_equal = len(found) == 1 and len(attention) <= 1 and len({repr(layer) for layer in found[0][1]}) == 1
    if not are_equal or count < _COUNTED_LAYERS:
        return _counted_bytes(decoder, tokens)
    ((name, layers),) = found
    try:
        decoder.register_module(name, layers[:1])
        one = _counted_bytes(decoder, tokens)
        decoder.register_module(name, layers[:2])
        return one + (count - 1) * (_counted_bytes(decoder, tokens) - one)
    finally:
        decoder.register_module(name, layers)


def count_plain_cache(base: PreTrainedModel) -> CacheBytes:
    """Count what `generate` keeps for a request; see `memory_parts.measure_plain_cache`."""
    decoder: nn.Module = base.get_decoder()

    def kept(tokens: int) -> int:
        with FakeTensorMode():
            forward, _ = _on_fake_tensors(decoder, tokens, use_cache=True)
            return kept_bytes(forward())

    return CacheBytes.from_sizes({tokens: kept(tokens) for tokens in PROBE_LENGTHS})


def _counted_bytes(decoder: nn.Module, tokens: int) -> int:
    with FakeTensorMode():
        return saved_bytes(*_on_fake_tensors(decoder, tokens, use_cache=False))


def _on_fake_tensors(
    decoder: nn.Module, tokens: int, *, use_cache: bool
) -> tuple[Callable[[], object], Iterable[Tensor]]:
    """Return the decoder's forward pass over one sequence on fake tensors, and its fake weights."""
    named = [*decoder.named_parameters(), *decoder.named_buffers()]
    fakes = {
        name: torch.empty(t.shape, dtype=t.dtype, device="cpu", requires_grad=t.requires_grad) for name, t in named
    }
    ids = torch.zeros(1, tokens, dtype=torch.long, device="cpu")

    def forward() -> object:
        return functional_call(decoder, fakes, (), {"input_ids": ids, "use_cache": use_cache})

    return forward, fakes.values()


def saved_bytes(forward: Callable[[], object], weights: Iterable[Tensor]) -> int:
    """Return the bytes that a forward pass saves for its backward pass, each storage once and without the weights."""
    weight_storages = {id(storage): storage for storage in map(Tensor.untyped_storage, weights)}
    saved: dict[int, torch.UntypedStorage] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in weight_storages:
            saved[id(storage)] = storage
        return tensor

    with saved_tensors_hooks(record, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in saved.values())


def _attention(config: PreTrainedConfig) -> str | None:
    """Return the learner's attention for whole sequences; None for transformers' own choice."""
    if needs_plain_sampling(config):
        return None
    return PACKED_ATTENTION if has_only_full_attention(config) else _UNMASKED_ATTENTION


def _unmasked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: object, **kwargs: object
) -> object:
    """Compute torch's causal attention over a whole sequence, without allocating a mask."""
    return AttentionInterface()["sdpa"](module, query, key, value, None, **kwargs)


AttentionInterface.register(_UNMASKED_ATTENTION, _unmasked_attention)
