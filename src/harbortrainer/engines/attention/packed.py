"""Packed sequences: several sequences concatenated in one row without padding, and the attention over them.

Each sequence attends to itself only. A prefix that several sequences share may be in the row once. That is exact, since
a causal model's output at a token depends on that token and earlier ones only. The gradients of all these sequences add
up at the prefix.

Contract: for models in which every layer has full attention (`has_only_full_attention`) and nothing else mixes tokens,
which `enable_packing` tests.

`attend_in_groups` is grouped-query attention through torch's kernels. It never uses torch's fallback for unsupported
inputs. On a GPU the fallback allocates a score for each pair of tokens and head: 9 GB for 4 096 tokens after 28 672 in
Qwen3-8B.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

_ALL_KERNELS_SUPPORT_GQA = torch.__version__ >= "2.15"
"""In earlier releases only flash attention supports grouped heads, and it supports neither a mask nor float32."""
_MAX_KERNEL_HEAD_DIM = 256
"""Largest head dimension for which GPU kernels support grouped heads."""


def attend_in_groups(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Compute grouped-query attention.

    Args:
        query: [B, H, Q, D].
        key, value: [B, G, K, D]; H is a multiple of G.
        mask: [Q, K], boolean (true for visible keys) or added to the scores; None for causal attention with Q = K.

    Returns:
        [B, H, Q, D].
    """
    heads_per_kv = query.shape[1] // key.shape[1]
    if heads_per_kv > 1 and not _has_gqa_kernel(query, mask):
        key, value = (x.repeat_interleave(heads_per_kv, dim=1) for x in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def _has_gqa_kernel(query: Tensor, mask: Tensor | None) -> bool:
    """Whether a kernel supports grouped heads for these inputs."""
    if query.device.type != "cuda":
        return True
    flash = mask is None and query.dtype is not torch.float32
    return query.shape[-1] <= _MAX_KERNEL_HEAD_DIM and (flash or _ALL_KERNELS_SUPPORT_GQA)


PACKED_ATTENTION = "packed"
"""The attention's name in transformers, which makes no mask for unknown names."""

_MAX_TAIL_RATIO = 2
"""A prefix is shared only if the rest is at most this many times as long. The attention after a shared prefix needs a
mask, which a whole sequence does not."""
_MAX_MASK_ENTRIES = 2**25
"""Limit for all masks of a row; a sequence beyond it does not share its prefix."""

_PROBE_SEQUENCES = [5, 9, 4, 7, 6, 8, 3, 10, 9], [5, 9, 4, 7, 6, 3, 8, 4, 11, 5, 7], [10, 3, 4, 8, 8, 5]
"""Sequences that a model is tested on: two with a common prefix, and one without."""
_TOLERANCE = {torch.float32: 1e-3}
"""Allowed relative difference between packed logits and logits of each sequence alone; else `_HALF_TOLERANCE`."""
_HALF_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that are contiguous both in a row and in a sequence.

    Attributes:
        tokens: Number of tokens.
        past: The tokens before them in their sequence, as pairs: an earlier segment's index, and how many of its first
            tokens.
        mask: [tokens, all keys] true for visible keys; None without a past (plain causal).
    """

    tokens: int
    past: tuple[tuple[int, int], ...]
    mask: Tensor | None


@dataclass(slots=True)
class PackedRow:
    """A row to which sequences are added.

    Attributes:
        token_ids: [T].
        positions: [T] each token's position in its sequence.
        places: For each sequence, the indices of its tokens in the row.
        copied: Tokens whose keys are copied for a later segment.
    """

    sharing: bool
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    copied: int = 0
    _mask_entries: int = 0
    _segments: list[tuple[int, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    _last: list[int] = field(default_factory=list)
    _pieces: list[tuple[int, int]] = field(default_factory=list)

    def shared(self, tokens: Sequence[int]) -> int:
        """Return how many first tokens of this sequence would be shared with the last one."""
        if not self.sharing:
            return 0
        prefix = common_prefix(self._last, tokens)
        tail = len(tokens) - prefix
        fits = self._mask_entries + tail * len(tokens) <= _MAX_MASK_ENTRIES
        return prefix if tail <= _MAX_TAIL_RATIO * prefix and fits else 0

    def add(self, tokens: Sequence[int]) -> None:
        """Append a sequence. Sequences with a common prefix must be added one after the other."""
        prefix = self.shared(tokens)
        pieces, begin, tail = _first_pieces(self._pieces, prefix), len(self.token_ids), len(tokens) - prefix
        places = self.places[-1][:prefix] if prefix else []
        if tail:
            self.copied += prefix
            self._mask_entries += tail * len(tokens) if prefix else 0
            self._segments.append((tail, tuple(pieces)))
            pieces.append((len(self._segments) - 1, tail))
        self.token_ids += tokens[prefix:]
        self.positions += range(prefix, len(tokens))
        self.places.append([*places, *range(begin, begin + tail)])
        self._last, self._pieces = list(tokens), pieces

    def segments(self, device: torch.device) -> list[Segment]:
        """Return the segments for the attention; masks of the same shape are one tensor."""
        masks: dict[tuple[int, int], Tensor] = {}
        return [Segment(tokens, past, _mask(tokens, past, masks, device)) for tokens, past in self._segments]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of two sequences' common prefix."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(i for i in range(shorter) if one[i] != other[i])


def _first_pieces(pieces: list[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """Return the pieces that hold a sequence's first `tokens` tokens."""
    found = []
    for segment, length in pieces:
        if tokens <= 0:
            break
        found.append((segment, min(length, tokens)))
        tokens -= length
    return found


def _mask(
    tokens: int, past: tuple[tuple[int, int], ...], masks: dict[tuple[int, int], Tensor], device: torch.device
) -> Tensor | None:
    before = sum(length for _, length in past)
    if not before:
        return None
    if (tokens, before) not in masks:
        masks[tokens, before] = torch.ones(tokens, before + tokens, dtype=torch.bool, device=device).tril(before)
    return masks[tokens, before]


def has_only_full_attention(config: PreTrainedConfig) -> bool:
    """Whether every layer has full causal attention, without a window and without soft-capped scores."""
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
    windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    return layer_types == {"full_attention"} and not windowed and not getattr(text, "attn_logit_softcapping", None)


@torch.no_grad()
def enable_packing(model: PreTrainedModel) -> bool:
    """Switch the model to packed attention if its outputs stay the same; returns whether it was switched."""
    if not has_only_full_attention(model.config):
        return False
    alone = [model(input_ids=_row(tokens, model), use_cache=False).logits[0] for tokens in _PROBE_SEQUENCES]
    try:
        model.set_attn_implementation(PACKED_ATTENTION)
        agree = _agree(model, alone)
    except (TypeError, ValueError):
        agree = False  # a model that does not pass keyword arguments to its attention
    if not agree:
        model.set_attn_implementation(model.get_correct_attn_implementation(None))
    return agree


def _agree(model: PreTrainedModel, alone: Sequence[Tensor]) -> bool:
    row = PackedRow(sharing=True)
    for tokens in _PROBE_SEQUENCES:
        row.add(tokens)
    segments = row.segments(model.device)
    logits = model(
        input_ids=_row(row.token_ids, model), position_ids=_row(row.positions, model), segments=segments,
        use_cache=False,
    ).logits[0]  # fmt: skip
    allowed = _TOLERANCE.get(logits.dtype, _HALF_TOLERANCE)
    pairs = ((logits[places].float(), own.float()) for places, own in zip(row.places, alone, strict=True))
    return all(bool((packed - own).norm() <= allowed * own.norm()) for packed, own in pairs)


def _row(numbers: Sequence[int], model: PreTrainedModel) -> Tensor:
    return torch.tensor([numbers], device=model.device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Sequence[Segment] | None = None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute packed attention; an attention function for transformers. Without segments each row is one sequence.

    Args:
        query: [B, H, T, D]; B is 1 with segments.
        key, value: [B, G, T, D]; H is a multiple of G.

    Returns:
        [B, T, H, D], and None in place of attention weights.
    """
    lengths = [segment.tokens for segment in segments or ()] or [query.shape[2]]
    # One split instead of a slice per segment: the gradient of a slice is as large as the whole row.
    queries, keys, values = (x.split(lengths, dim=2) for x in (query, key, value))
    attended = []
    for i, segment in enumerate(segments or [Segment(lengths[0], (), None)]):
        k, v = (_with_past(x, i, segment.past) for x in (keys, values))
        attended.append(attend_in_groups(queries[i], k, v, segment.mask, scaling).transpose(1, 2))
    return torch.cat(attended, dim=1), None


def _with_past(parts: Sequence[Tensor], own: int, past: tuple[tuple[int, int], ...]) -> Tensor:
    if not past:
        return parts[own]
    return torch.cat([*(parts[i][:, :, :length] for i, length in past), parts[own]], dim=2)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
