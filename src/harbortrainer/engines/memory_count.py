"""Counts what a model will hold in memory, before anything is loaded.

The model is built without content (torch's meta device), so that weights, adapter and cache are those of the engine's
own code. What a training pass keeps for its backward pass is counted by running it on tensors without content, twice:
it grows with the tokens in a straight line. Only a model whose layers do not all attend to everything before them has
a matrix over all pairs of a sample's tokens, the mask, which is counted by hand.
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
from harbortrainer.couplings import Couplings
from harbortrainer.engines.architectures import need_sampled
from harbortrainer.engines.cache_size import cache_bytes_per_token
from harbortrainer.engines.forward_pass import ForwardPass
from harbortrainer.engines.local.learner.lora_policy import lora_config
from harbortrainer.engines.local.learner.trained_policy import recompute_activations
from harbortrainer.engines.local.sampler.sampled_model import context_limit, resolve_dtype
from harbortrainer.engines.memory_plan import KEPT_BESIDE, MemoryPlan
from harbortrainer.engines.packed_attention import PACKED_ATTENTION, attends_to_all
from harbortrainer.engines.peft_internals import adapter_weights, inject_for_training
from harbortrainer.engines.pretrained import empty_model, load_config
from harbortrainer.engines.quantized_base import largest_layer, quantize

COUPLINGS = Couplings("torch", "2.15", __name__, ("torch._subclasses.fake_tensor:FakeTensorMode",))
COUPLINGS.check()

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 (not before the check)

COMPUTED_WITH = 3
"""Copies of an adapter in the base's dtype: the learner's, and two versions of the sampler's; requests that go on under
still older ones keep one more each."""
MASKS = 2
"""Of true and false, one for each kind of layer. A layer makes one of numbers from its own, and keeps it."""
STEPPED = 4
"""Bytes of a float32: of every weight a gradient and AdamW's two moments, and a master where the model has fewer."""
_PROBES = 64, 192
_MASKLESS = "sdpa without mask"


def plan_memory(
    model: Path,
    lora: LoraSettings | None,
    *,
    kind: str,
    room: int,
    quantization: Quantization | None = None,
    off_policy: int = 8,
) -> MemoryPlan:
    """Count it for a model's folder, of which only the config is read.

    Args:
        lora: None trains every weight.
        kind: Of device, "cpu" or "cuda"; it need not be there.
        room: Bytes.
        quantization: Of the base's linear layers.
        off_policy: `max_off_policy_steps`.

    Raises:
        UserError: The config cannot be read, or is of a model that cannot be sampled from; no linear layer matches
            lora.target_modules or can be quantized, or there is no library to quantize; `where` is the run's key.
        RuntimeError: What the model computes depends on its content (which experts a token goes to), so that it cannot
            be run without.
    """
    dtype = resolve_dtype("auto", torch.device(kind))
    base, weights = without_content(model, lora, dtype, quantization)
    text = base.config.get_text_config()
    kept, block, at_once = kept_per_token(base), 0, text.num_hidden_layers
    if kind != "cpu":
        recompute_activations(base)
        kept, block, at_once = kept_per_token(base), kept // text.num_hidden_layers, 1
    return MemoryPlan(
        kind=kind,
        room=room,
        weights=(2 if lora is None else 1) * weights + 2 * dtype.itemsize * largest_layer(base),
        trained=stepped(base) if lora is None else of_adapter(base),
        version=weights if lora is None else 0,
        versions=off_policy + 1 + KEPT_BESIDE,
        cached_token=cache_bytes_per_token(base, kind),
        forward=ForwardPass.of(base, kind),
        kept_token=kept,
        block_token=block,
        pair=0 if attends_to_all(base.config) else MASKS + at_once * dtype.itemsize,
        vocab=text.vocab_size,
        longest_known=context_limit(base.config, None),
    )


def stepped(model: nn.Module) -> int:
    """Bytes of what an optimizer of every weight has beside the model, and of the two gradients of the largest weight
    that are added up where it is used twice."""
    weights = list(model.parameters())
    largest = max(weight.nbytes for weight in weights)
    return sum(STEPPED * beside(weight) * weight.numel() for weight in weights) + 2 * largest


def of_adapter(model: nn.Module) -> int:
    """Bytes of an adapter on both sides, and of what an optimizer has beside it."""
    weights = list(adapter_weights(model, "default").values())
    return COMPUTED_WITH * bytes_of(weights) + sum(STEPPED * beside(w) * w.numel() for w in weights)


def beside(weight: Tensor) -> int:
    """Float32 numbers that the optimizer has beside one of a weight's: gradient, two moments, and a master."""
    return 3 if weight.dtype is torch.float32 else 4


def without_content(
    model: Path, lora: LoraSettings | None, dtype: torch.dtype, quantization: Quantization | None = None
) -> tuple[PreTrainedModel, int]:
    """The base, with an adapter to train or all of it, and the bytes it had before; raises as `plan_memory`."""
    need_sampled(load_config(model, where="model.name"), str(model), where="model.name")
    base = empty_model(model, dtype, where="model.name", attention=_attention)
    if quantization is not None:
        quantize(base, quantization, torch.device("meta"))
    weights = bytes_of(base.parameters())
    if lora is None:
        base.requires_grad_(True).eval()
        return base, weights
    with torch.device("meta"):
        adapted, _ = inject_for_training(base, lora_config(base, lora, base.name_or_path or ""))
    adapted.eval()
    return base, weights


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of all of them."""
    return sum(tensor.nbytes for tensor in tensors)


def kept_per_token(base: PreTrainedModel) -> int:
    """Bytes that a token of a micro batch leaves in the decoder for the backward pass.

    They are counted as on a CPU, whose attention keeps what a GPU's does.

    Args:
        base: On torch's meta device; what is to be trained has a gradient.
    """
    few, many = (_kept(base, tokens) for tokens in _PROBES)
    return -(-(many - few) // (_PROBES[1] - _PROBES[0]))


def _kept(base: PreTrainedModel, tokens: int) -> int:
    decoder: nn.Module = base.get_decoder()
    with FakeTensorMode():
        named = [*decoder.named_parameters(), *decoder.named_buffers()]
        content = {
            name: torch.empty(t.shape, dtype=t.dtype, device="cpu", requires_grad=t.requires_grad) for name, t in named
        }
        ids = torch.zeros(1, tokens, dtype=torch.long, device="cpu")

        def forward() -> object:
            return functional_call(decoder, content, (), {"input_ids": ids, "use_cache": False})

        return kept_by(forward, content.values())


def kept_by(forward: Callable[[], object], weights: Iterable[Tensor]) -> int:
    """Bytes of what a forward pass keeps for its backward pass, each once and the weights left out."""
    known = {id(storage): storage for storage in map(Tensor.untyped_storage, weights)}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in known:
            kept[id(storage)] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


def _attention(config: PreTrainedConfig) -> str:
    """The learner's, as it is for whole sequences."""
    return PACKED_ATTENTION if attends_to_all(config) else _MASKLESS


def _maskless(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: object, **kwargs: object) -> object:
    """torch's attention for whole sequences: causal, and no mask is made for it."""
    return AttentionInterface()["sdpa"](module, query, key, value, None, **kwargs)


AttentionInterface.register(_MASKLESS, _maskless)
