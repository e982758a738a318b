"""Forward passes on torch's fake tensors: their allocations and saved activations are counted, nothing is computed.

The counts are for a CPU. They contain no buffers inside an operation; tests compare them with torch's allocations.
"""

import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from harbortrainer.engines.memory_parts import PromptBytes, find_cache
from harbortrainer.private_apis import PrivateApi

PRIVATE_APIS = PrivateApi(
    library="torch",
    written_for="2.15",
    used_by=__name__,
    places=(
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "torch.utils._python_dispatch:TorchDispatchMode",
        "torch.utils._pytree:tree_leaves",
    ),
)
PRIVATE_APIS.check()

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 (not before the check)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

PROBE = 251
"""Tokens of a probe. No other dimension of a model is likely to equal this prime. Layers with a state pad it to 256."""


def on_fake_tensors(decoder: nn.Module) -> tuple[Callable[..., object], Iterable[Tensor]]:
    """Return the decoder's forward pass on fake tensors, and its fake weights. Call it within `FakeTensorMode`."""
    named = [*decoder.named_parameters(), *decoder.named_buffers()]
    fakes = {
        name: torch.empty(t.shape, dtype=t.dtype, device="cpu", requires_grad=t.requires_grad) for name, t in named
    }
    return lambda **inputs: functional_call(decoder, fakes, (), inputs), fakes.values()


def is_pair(tensor: Tensor, tokens: int) -> bool:
    """Whether a tensor has a number for each pair of a sequence's tokens, such as a mask or attention scores.

    One more token is allowed: gpt-oss appends a column to its scores.
    """
    return sum(size in (tokens, tokens + 1) for size in tensor.shape) >= 2


def saved_tensors(forward: Callable[[], object], weights: Iterable[Tensor]) -> list[Tensor]:
    """Return what a forward pass saves for its backward pass: a tensor of each storage, without the weights'."""
    weight_storages = {id(storage): storage for storage in map(Tensor.untyped_storage, weights)}
    saved: dict[int, Tensor] = {}

    def record(tensor: Tensor) -> Tensor:
        if id(tensor.untyped_storage()) not in weight_storages:
            saved.setdefault(id(tensor.untyped_storage()), tensor)
        return tensor

    with saved_tensors_hooks(record, lambda tensor: tensor):
        forward()
    return list(saved.values())


class Allocations(TorchDispatchMode):
    """Counts the bytes alive of tensors that operations make in the block, on fake or real tensors.

    Tensors with the shape of a weight are not counted: they are gradients, which do not grow with the tokens.

    Args:
        tokens: Length of the sequences. Tensors with a number for each pair of tokens are counted apart.
        existing: Weights and inputs.

    Attributes:
        alive: Bytes of other tensors, and of pairs.
        moments: `alive` after each allocation.
    """

    def __init__(self, tokens: int, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self._tokens, self._existing = tokens, list(existing)
        self._shapes = {shape for t in self._existing for shape in (tuple(t.shape), tuple(reversed(t.shape)))}
        self._known = {id(tensor.untyped_storage()) for tensor in self._existing}
        self.alive = (0, 0)
        self.moments: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self._known:
                self._allocated(tensor)
        return output

    def _allocated(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        size = 0 if tuple(tensor.shape) in self._shapes else storage.nbytes()
        change = (0, size) if is_pair(tensor, self._tokens) else (size, 0)
        self._known.add(id(storage))
        self._change(change)
        self.moments.append(self.alive)
        weakref.finalize(storage, self._freed, id(storage), (-change[0], -change[1]))

    def _freed(self, key: int, change: tuple[int, int]) -> None:
        self._known.discard(key)
        self._change(change)

    def _change(self, change: tuple[int, int]) -> None:
        self.alive = (self.alive[0] + change[0], self.alive[1] + change[1])


class FusedAttention(TorchFunctionMode):
    """Makes torch's attention on a CPU allocate what a GPU's does if values are narrower than keys: no scores."""

    def __torch_function__(
        self, func: Callable[..., Tensor], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value, *others = args
        width = value.shape[-1]
        padded = pad(value, (0, query.shape[-1] - width))
        return func(query, key, padded, *others, **(kwargs or {}))[..., :width]


def count_prompt(model: PreTrainedModel) -> PromptBytes:
    """Count the bytes that `generate` needs beside the cache. The model may be on the meta device.

    Only the layers up to the last new kind are run: layers run one after the other, so the largest one counts.

    Raises:
        RuntimeError: The forward pass depends on tensor values, and cannot run on fake tensors.
    """
    decoder: nn.Module = model.get_decoder()
    with each_kind_of_layer(decoder, model.config), FakeTensorMode(), torch.no_grad():
        return _prompt_bytes(*on_fake_tensors(decoder), torch.device("cpu"))


def measure_prompt(model: PreTrainedModel) -> PromptBytes:
    """Return the same of a real forward pass, which takes longer. The model is on its device."""
    decoder: nn.Module = model.get_decoder()
    with each_kind_of_layer(decoder, model.config), torch.no_grad():
        return _prompt_bytes(decoder, [*decoder.parameters(), *decoder.buffers()], model.device)


def _prompt_bytes(forward: Callable[..., object], weights: Iterable[Tensor], device: torch.device) -> PromptBytes:
    """Run two prompts, since padding is not masked for a single one, and a step after them."""
    rows, tokens = 2, PROBE
    ids, mask = (torch.ones(rows, tokens + 1, dtype=torch.long, device=device) for _ in range(2))
    mask[0, 0] = 0
    with Allocations(tokens, [*weights, ids, mask]) as counted:
        output = forward(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
        prompts = [(first // (rows * tokens), pairs // (rows * tokens**2)) for first, pairs in counted.moments]
        cached = find_cache(output)
        del output
        before = sum(counted.alive)
        counted.moments.clear()
        if cached:
            forward(input_ids=ids[:, -1:], attention_mask=mask, use_cache=True, **cached)
        step = max((first + pairs for first, pairs in counted.moments), default=before) - before
    return PromptBytes(moments=largest_moments(prompts), per_cached_token=step // (rows * tokens))


def largest_moments(moments: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the moments that are not exceeded by another one in both numbers.

    Examples:
        >>> largest_moments([(5, 0), (3, 2), (4, 1), (2, 1)])
        ((5, 0), (4, 1), (3, 2))
    """
    largest: list[tuple[int, int]] = []
    for moment in sorted(set(moments), reverse=True):
        if not largest or moment[1] > largest[-1][1]:
            largest.append(moment)
    return tuple(largest)


@contextmanager
def each_kind_of_layer(decoder: nn.Module, config: PreTrainedConfig) -> Generator[None]:
    """Shorten a decoder to the layers up to the last new kind and the next one; restored after the block.

    The next one is there because some decoders hold what a layer returns until the next layer has ended.
    """
    found = [(name, layers) for name, layers in decoder.named_children() if isinstance(layers, nn.ModuleList)]
    if len(found) != 1:
        yield
        return
    ((name, layers),) = found
    types = getattr(config.get_text_config(), "layer_types", None) or [""] * len(layers)
    kinds = [(repr(layer), kind) for layer, kind in zip(layers, types, strict=False)]
    try:
        decoder.register_module(name, layers[: max(map(kinds.index, kinds)) + 2])
        yield
    finally:
        decoder.register_module(name, layers)
