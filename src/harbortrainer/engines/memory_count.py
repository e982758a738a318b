"""Counts a run's memory before anything is loaded.

The engine's own code builds the model on torch's meta device, so weights, adapter and cache are exact. Activations
saved for the backward pass are counted with fake tensors, at two lengths, since they grow linearly with the tokens.
Masks grow with the square of a sample's length and are counted by formula. Only models with layers other than full
attention have them. For models that `generate` samples, prompts, steps, backward passes and pairs of tokens are counted
with fake tensors too, since their layers have little in common.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from harbortrainer.config.runfile import Quantization
from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.engines.attention.packed import PACKED_ATTENTION, has_only_full_attention
from harbortrainer.engines.fake_forward import (
    PROBE,
    Allocations,
    FakeTensorMode,
    FusedAttention,
    count_prompt,
    each_kind_of_layer,
    is_pair,
    on_fake_tensors,
    saved_tensors,
)
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

ADAPTER_COPIES = 3
"""Adapters in the base's dtype: the learner's, and two versions in the sampler. Requests of still older versions keep
one more each, which is not counted."""
BOOLEAN_MASKS = 2
"""Boolean masks, one per layer type. Each layer makes a numeric copy of its own, and saves it."""
FLOAT_BYTES = 4
"""Bytes of a float32. Gradients, AdamW's two moments and master weights are float32."""
_COUNTED_LAYERS = 4
_SAVED_LENGTHS = PROBE, 509
"""Primes below multiples of the lengths to which layers with a state pad; see `PROBE`."""
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
    on_gpu = device_type != "cpu"
    if needs_plain_sampling(base.config):
        with FusedAttention() if on_gpu else nullcontext():  # before activations are recomputed: without a cache then
            kept, prompt = count_plain_cache(base), count_prompt(base)
            saved, recomputed, pairs = count_plain_training(base, recomputes=on_gpu)
    else:
        kept, prompt = CacheBytes(per_token=cache_bytes_per_token(base, device_type), per_request=0), None
        saved, recomputed, pairs = count_training(base, recomputes=on_gpu)
    return MemoryPlan(
        device_type=device_type,
        capacity=capacity,
        weights=(2 if lora is None else 1) * weights + 2 * resolved.itemsize * largest_layer(base),
        trained=full_training_bytes(base) if lora is None else adapter_training_bytes(base),
        version=weights if lora is None else 0,
        versions=off_policy + 1 + EXTRA_VERSIONS,
        cache_bytes=kept,
        forward=ForwardPass.for_model(base, device_type, prompt),
        saved_per_token=saved,
        recomputed_per_token=recomputed,
        mask_per_pair=pairs,
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
    base = build_meta_model(model, dtype, attention=_attention)
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


def count_training(base: PreTrainedModel, *, recomputes: bool) -> tuple[int, int, int]:
    """Count a micro batch's bytes: saved per token, recomputed per token, and masks per pair of a sample's tokens.

    Args:
        base: On torch's meta device; trained weights require gradients.
        recomputes: Whether activations are recomputed. They are from now on.
    """
    saved, recomputed, masked_layers = count_saved(base).per_token, 0, base.config.get_text_config().num_hidden_layers
    if recomputes:
        recompute_activations(base)
        saved, recomputed, masked_layers = count_saved(base).per_token, saved // masked_layers, 1
    masks = 0 if has_only_full_attention(base.config) else BOOLEAN_MASKS + masked_layers * base.dtype.itemsize
    return saved, recomputed, masks


def count_plain_training(base: PreTrainedModel, *, recomputes: bool) -> tuple[int, int, int]:
    """Count the same for a model with transformers' own attention, which may save scores of each pair and head.

    What is recomputed includes the temporaries of a layer's backward pass.
    """
    if recomputes:
        recompute_activations(base)
    saved, (recomputed, pairs) = count_saved(base), count_backward(base)
    return saved.per_token, recomputed, saved.per_pair + pairs


def count_backward(base: PreTrainedModel) -> tuple[int, int]:
    """Return the bytes that a backward pass needs beside the saved activations: per token, and per pair of tokens."""
    decoder: nn.Module = base.get_decoder()
    with each_kind_of_layer(decoder, base.config), FakeTensorMode():
        step, weights = on_fake_tensors(_TrainingStep(decoder))
        ids = _one_sequence(PROBE)
        with Allocations(PROBE, [*weights, ids]) as counted:
            step(ids=ids, counted=counted)
    saved, *later = counted.moments
    others, pairs = (max(moment[kind] for moment in later) - saved[kind] for kind in (0, 1))
    return others // PROBE, pairs // PROBE**2


class _TrainingStep(nn.Module):
    """A module, so that the backward pass, which may recompute layers, has the fake weights too."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor, counted: Allocations) -> None:
        """Run a training step. The first moment is what was alive before the backward pass."""
        states = self.decoder(input_ids=ids, use_cache=False)[0]  # Llama 4's decoder has the head: then the logits
        counted.moments = [counted.alive, max(counted.moments, key=sum)]
        torch.autograd.backward(states.sum())  # `Tensor.backward` would suspend `FusedAttention`


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes that a sample of a micro batch saves in the decoder for the backward pass, per token and pair of tokens."""

    per_token: int
    per_pair: int


def count_saved(base: PreTrainedModel) -> Saved:
    """Count what a sample saves. The count is for a CPU; a GPU's attention saves the same.

    Args:
        base: On torch's meta device; trained weights require gradients.
    """
    (short, _), (long, pairs) = (_saved_bytes_of(base, tokens) for tokens in _SAVED_LENGTHS)
    first, second = _SAVED_LENGTHS
    return Saved(per_token=-(-(long - short) // (second - first)), per_pair=-(-pairs // second**2))


def _saved_bytes_of(base: PreTrainedModel, tokens: int) -> tuple[int, int]:
    """Return the bytes that a sample saves: other tensors, and pairs.

    Of many equal layers only two are counted, which is much faster.
    """
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
        two = _counted_bytes(decoder, tokens)
        return one[0] + (count - 1) * (two[0] - one[0]), one[1] + (count - 1) * (two[1] - one[1])
    finally:
        decoder.register_module(name, layers)


def count_plain_cache(base: PreTrainedModel) -> CacheBytes:
    """Count what `generate` keeps for a request; see `memory_parts.measure_plain_cache`."""

    def kept(tokens: int) -> int:
        with FakeTensorMode():
            forward, _ = on_fake_tensors(base.get_decoder())
            return kept_bytes(forward(input_ids=_one_sequence(tokens), use_cache=True))

    return CacheBytes.from_sizes({tokens: kept(tokens) for tokens in PROBE_LENGTHS})


def _one_sequence(tokens: int) -> Tensor:
    return torch.zeros(1, tokens, dtype=torch.long, device="cpu")


def _counted_bytes(decoder: nn.Module, tokens: int) -> tuple[int, int]:
    with FakeTensorMode():
        forward, weights = on_fake_tensors(decoder)
        saved = saved_tensors(lambda: forward(input_ids=_one_sequence(tokens), use_cache=False), weights)
        pairs = sum(tensor.untyped_storage().nbytes() for tensor in saved if is_pair(tensor, tokens))
        return saved_bytes(saved) - pairs, pairs


def saved_bytes(saved: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of these tensors, which have one each."""
    return sum(tensor.untyped_storage().nbytes() for tensor in saved)


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
