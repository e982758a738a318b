"""What the embedded engine will hold in memory, counted before anything is loaded: what the doctor prints, and what
sampler and learner then take on a GPU.

The learner comes first: what its largest micro batch needs is left to it, and the cache gets what remains, up to its
share. Where that leaves no room for one request, the micro batch gives way, down to one sample of the longest length.

The model is built without content (torch's meta device), so that weights, adapter and cache are those of the engine's
own code. What a training pass keeps for its backward pass is counted by running it on tensors without content, twice:
it grows with the tokens in a straight line. Only a model whose layers do not all attend to everything before them has
a matrix over all pairs of a sample's tokens, the mask, which is counted by hand.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
from harbortrainer.engines.cache_size import cache_bytes_per_token, cache_tokens
from harbortrainer.engines.engine_choice import LORA_INSTEAD
from harbortrainer.engines.local.learner.lora_policy import lora_config
from harbortrainer.engines.local.learner.micro_batch import MICRO_BATCH
from harbortrainer.engines.local.learner.trained_policy import CHUNK_ELEMENTS, recompute_activations
from harbortrainer.engines.local.sampler.sampled_model import context_limit, resolve_dtype
from harbortrainer.engines.packed_attention import PACKED_ATTENTION, attends_to_all
from harbortrainer.engines.peft_internals import adapter_weights, inject_for_training
from harbortrainer.engines.pretrained import empty_model, load_config
from harbortrainer.engines.quantized_base import largest_layer, quantize
from harbortrainer.errors import UserError

COUPLINGS = Couplings("torch", "2.15", __name__, ("torch._subclasses.fake_tensor:FakeTensorMode",))
COUPLINGS.check()

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 (not before the check)

LOGITS = 6
"""Float32 copies of a chunk of logits at once: the logits, divided by the temperature, their softmax's logarithm, its
exponential, their product, and a gradient."""
ADAPTER_COPIES = 6
"""Float32: the learner's weights, their gradient, AdamW's two moments, and two versions of the sampler's; requests that
go on under still older ones keep one more each."""
MASKS = 2
"""Of true and false, one for each kind of layer. A layer makes one of numbers from its own, and keeps it."""
STEPPED = 4
"""Bytes of a float32: of every weight a gradient and AdamW's two moments, and a master where the model has fewer."""
KEPT_BESIDE = 3
"""Versions that the learner has beside those that may still train: the one forgotten last, version 0, and for a moment
the one that is forgotten next."""
GIB = 1024**3
_PROBES = 64, 192
_MASKLESS = "sdpa without mask"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on the device that computes; tokens are of one sequence unless said otherwise."""

    kind: str
    """Of device: "cpu" or "cuda"."""
    room: int
    """What there is for all of it."""
    weights: int
    """The base, once, and twice where every weight is trained; of a quantized one also its largest layer as either side
    computes with it."""
    trained: int
    """The LoRA of both sides, or the float32 masters; their gradient and their optimizer."""
    version: int
    """One policy version, of which the learner keeps several in the machine's memory; 0 for a LoRA's."""
    versions: int
    """How many it keeps."""
    cached_token: int
    """Keys and values of a token, and its columns of the masks where there are any."""
    kept_token: int
    """What a token of a micro batch leaves for the backward pass."""
    block_token: int
    """What computing a block again adds, a token; 0 where nothing is computed again."""
    pair: int
    """What two tokens of a sample have in masks; 0 where none is made. Samples go one by one where there are."""
    vocab: int
    longest_known: int
    """Tokens that the model was made for."""

    def micro_batch(self, context: int, seq_len: int) -> int:
        """Tokens of the learner's micro batch: all that are of use, less where the cache has no room beside them, and
        no fewer than a sample of `seq_len` tokens has."""
        tokens = seq_len if self.pair else MICRO_BATCH[self.kind]
        while tokens > seq_len and self._cache(context, max(tokens, seq_len)) < context:
            tokens = max(tokens // 2, seq_len)
        return tokens

    def cache(self, context: int, seq_len: int) -> int:
        """Tokens that the sampler's cache holds, 0 when not one request of that length fits."""
        tokens = self._cache(context, max(self.micro_batch(context, seq_len), seq_len))
        return tokens if tokens >= context else 0

    def _cache(self, context: int, micro_batch: int) -> int:
        free = max(0, self.room - self.weights)
        left = max(0, free - self.trained - self.kept - self.learner(micro_batch)) // self.cached_token
        affordable, tokens = cache_tokens(free, self.kind, self.cached_token, context)
        return min(affordable, tokens, left)

    @property
    def kept(self) -> int:
        """Bytes of the versions that are kept where the model computes: on a CPU all."""
        return self.version * self.versions if self.kind == "cpu" else 0

    def learner(self, tokens: int) -> int:
        """Bytes of a micro batch of so many tokens."""
        logits = min(CHUNK_ELEMENTS, tokens * self.vocab)
        return tokens * (self.kept_token + self.block_token + tokens * self.pair) + LOGITS * 4 * logits

    def parts(self, context: int, seq_len: int) -> dict[str, int]:
        """Bytes by what they are for; their sum is everything at once."""
        tokens, cached = max(self.micro_batch(context, seq_len), seq_len), self.cache(context, seq_len)
        return {
            "model twice" if self.version else "model": self.weights,
            "gradient and optimizer" if self.version else "adapter and optimizer": self.trained,
            **({f"{self.versions} versions": self.kept} if self.kept else {}),
            f"cache for {cached // context} trials of {context} tokens at once": cached * self.cached_token,
            f"learner's {tokens} tokens at once, seq_len {seq_len}": self.learner(tokens),
        }

    def fits(self, context: int, seq_len: int) -> bool:
        """Whether a run has room.

        Args:
            context: Tokens of the sampler's longest request.
            seq_len: Tokens of the learner's longest sample.
        """
        return self.cache(context, seq_len) > 0

    def refusal(self, context: int, seq_len: int) -> UserError | None:
        """What to say of a run that has no room, with the nearest length that has; None where it fits."""
        if self.fits(context, seq_len):
            return None
        what = self.told(context, seq_len)
        if self.longest:
            return UserError(what, where="seq_len", do=f"set it to {self.longest} or less")
        if self.version:
            return UserError(what, where="trainer.model.lora", do=LORA_INSTEAD)
        return UserError(what, where="model.name", do="use a smaller model, or Prime-RL (docs/sizing.md)")

    def host_refusal(self, room: int) -> UserError | None:
        """What to say where the versions that are kept beside a GPU do not fit into so many bytes of the machine's."""
        needed = self.version * self.versions
        if self.kind == "cpu" or needed <= room:
            return None
        what = f"{self.versions} versions of the model are kept, {needed / GIB:.2f} of {room / GIB:.2f} GiB of memory"
        if self.version * (1 + KEPT_BESIDE) <= room:
            most = room // self.version - KEPT_BESIDE - 1
            return UserError(what, where="orchestrator.max_off_policy_steps", do=f"set it to {most} or less")
        return UserError(what, where="trainer.model.lora", do=LORA_INSTEAD)

    def told(self, context: int, seq_len: int) -> str:
        """The plan in one sentence."""
        parts = self.parts(context, seq_len)
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        total, room = sum(parts.values()) / GIB, self.room / GIB
        return f"GiB: {listed}; {total:.2f} of {room:.2f}; the longest sequence that fits has {self.longest} tokens"

    @property
    def longest(self) -> int:
        """The longest sequence that has room, at most what the model was made for; in steps of 256, 0 for none."""
        if self.fits(self.longest_known, self.longest_known):
            return self.longest_known
        low, high = 0, self.longest_known // 256
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(256 * middle, 256 * middle) else (low, middle - 1)
        return 256 * low


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
        trained=stepped(base) if lora is None else ADAPTER_COPIES * bytes_of(adapter_weights(base, "default").values()),
        version=weights if lora is None else 0,
        versions=off_policy + 1 + KEPT_BESIDE,
        cached_token=cache_bytes_per_token(base, kind),
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
    copies = [3 if weight.dtype is torch.float32 else 4 for weight in weights]
    largest = max(weight.nbytes for weight in weights)
    return STEPPED * sum(n * w.numel() for n, w in zip(copies, weights, strict=True)) + 2 * largest


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
