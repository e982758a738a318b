"""Sequences one after the other in one row, without padding: how they are laid out, and the attention over them.

Each sequence attends to itself alone. Where several begin alike, the beginning may stand in the row once, and be
attended to by all of them: what a causal model computes at a token depends on that token and those before it only, so
that this is exact, and the gradients of all of them add up at the beginning.

Contract: for models in which every layer attends to everything before it (`attends_to_all`) and nothing else mixes
tokens (`packs_rows` tries).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from harbortrainer.engines.grouped_attention import attend_in_groups

PACKED_ATTENTION = "packed"
"""The name under which transformers knows it, and makes no mask for it."""

_WORTH = 2
"""A beginning is shared where what follows is no more than so many times as long: the attention behind a shared
beginning needs a mask, which a whole sequence does not."""
_MASKED = 2**25
"""Entries of all masks of a row; what would need more does not share its beginning."""

_SEQUENCES = [5, 9, 4, 7, 6, 8, 3, 10, 9], [5, 9, 4, 7, 6, 3, 8, 4, 11, 5, 7], [10, 3, 4, 8, 8, 5]
"""What a model is tried on: two that begin alike, and one that does not."""
_AGREE = {torch.float32: 1e-3}
"""How far logits may be from those of each sequence alone, as a share; `_ROUNDED` in half precision."""
_ROUNDED = 0.05


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that stand one after the other in a row and in a sequence.

    Attributes:
        tokens: How many.
        before: What comes before them in their sequence: of earlier stretches, by number, the first so many tokens.
        mask: [tokens, all keys] true where a token may look; None where nothing comes before (plain causal).
    """

    tokens: int
    before: tuple[tuple[int, int], ...]
    mask: Tensor | None


@dataclass(slots=True)
class PackedRow:
    """A row that grows by sequences.

    Attributes:
        token_ids: [T].
        positions: [T] each token's in its sequence.
        places: For each sequence, where in the row its tokens are.
        copied: Tokens whose keys are laid beside a stretch's own once more.
    """

    sharing: bool
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    copied: int = 0
    _masked: int = 0
    _stretches: list[tuple[int, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    _last: list[int] = field(default_factory=list)
    _pieces: list[tuple[int, int]] = field(default_factory=list)

    def shared(self, tokens: Sequence[int]) -> int:
        """How much of this sequence's beginning is here already and would not be computed again."""
        if not self.sharing:
            return 0
        alike = common(self._last, tokens)
        tail = len(tokens) - alike
        return alike if tail <= _WORTH * alike and self._masked + tail * len(tokens) <= _MASKED else 0

    def add(self, tokens: Sequence[int]) -> None:
        """Lay a sequence behind the others; those that begin alike have to come one after the other."""
        alike = self.shared(tokens)
        pieces, begin, tail = _first(self._pieces, alike), len(self.token_ids), len(tokens) - alike
        places = self.places[-1][:alike] if alike else []
        if tail:
            self.copied += alike
            self._masked += tail * len(tokens) if alike else 0
            self._stretches.append((tail, tuple(pieces)))
            pieces.append((len(self._stretches) - 1, tail))
        self.token_ids += tokens[alike:]
        self.positions += range(alike, len(tokens))
        self.places.append([*places, *range(begin, begin + tail)])
        self._last, self._pieces = list(tokens), pieces

    def stretches(self, device: torch.device) -> list[Stretch]:
        """What the attention has to know; masks of one shape are one tensor."""
        masks: dict[tuple[int, int], Tensor] = {}
        return [Stretch(tokens, before, _mask(tokens, before, masks, device)) for tokens, before in self._stretches]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common from their beginning."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(i for i in range(shorter) if one[i] != other[i])


def _first(pieces: list[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """The pieces of a sequence's first tokens."""
    found = []
    for stretch, length in pieces:
        if tokens <= 0:
            break
        found.append((stretch, min(length, tokens)))
        tokens -= length
    return found


def _mask(
    tokens: int, before: tuple[tuple[int, int], ...], masks: dict[tuple[int, int], Tensor], device: torch.device
) -> Tensor | None:
    past = sum(length for _, length in before)
    if not past:
        return None
    if (tokens, past) not in masks:
        masks[tokens, past] = torch.ones(tokens, past + tokens, dtype=torch.bool, device=device).tril(past)
    return masks[tokens, past]


def attends_to_all(config: PreTrainedConfig) -> bool:
    """Whether every layer attends to everything before it, by scores that nothing is done to."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    return kinds == {"full_attention"} and not windowed and not getattr(text, "attn_logit_softcapping", None)


@torch.no_grad()
def packs_rows(model: PreTrainedModel) -> bool:
    """Give the model this attention, where it then computes what it computed with its own; else it keeps its own."""
    if not attends_to_all(model.config):
        return False
    alone = [model(input_ids=_row(tokens, model), use_cache=False).logits[0] for tokens in _SEQUENCES]
    try:
        model.set_attn_implementation(PACKED_ATTENTION)
        agree = _agree(model, alone)
    except (TypeError, ValueError):
        agree = False  # a model that hands nothing on to its attention
    if not agree:
        model.set_attn_implementation(model.get_correct_attn_implementation(None))
    return agree


def _agree(model: PreTrainedModel, alone: Sequence[Tensor]) -> bool:
    row = PackedRow(sharing=True)
    for tokens in _SEQUENCES:
        row.add(tokens)
    stretches = row.stretches(model.device)
    logits = model(
        input_ids=_row(row.token_ids, model), position_ids=_row(row.positions, model), stretches=stretches,
        use_cache=False,
    ).logits[0]  # fmt: skip
    allowed = _AGREE.get(logits.dtype, _ROUNDED)
    pairs = ((logits[places].float(), own.float()) for places, own in zip(row.places, alone, strict=True))
    return all(bool((packed - own).norm() <= allowed * own.norm()) for packed, own in pairs)


def _row(numbers: Sequence[int], model: PreTrainedModel) -> Tensor:
    return torch.tensor([numbers], device=model.device)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    stretches: Sequence[Stretch] | None = None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """An attention function of transformers'; without stretches each row is one sequence.

    Args:
        query: [B, H, T, D]; B is 1 where there are stretches.
        key, value: [B, G, T, D]; H is a multiple of G.

    Returns:
        [B, T, H, D], and None for the weights.
    """
    lengths = [stretch.tokens for stretch in stretches or ()] or [query.shape[2]]
    # One split, not a slice each: the gradient of a slice is as large as the whole row.
    queries, keys, values = (x.split(lengths, dim=2) for x in (query, key, value))
    attended = []
    for i, stretch in enumerate(stretches or [Stretch(lengths[0], (), None)]):
        k, v = (_with_past(x, i, stretch.before) for x in (keys, values))
        attended.append(attend_in_groups(queries[i], k, v, stretch.mask, scaling).transpose(1, 2))
    return torch.cat(attended, dim=1), None


def _with_past(parts: Sequence[Tensor], own: int, before: tuple[tuple[int, int], ...]) -> Tensor:
    if not before:
        return parts[own]
    return torch.cat([*(parts[i][:, :, :length] for i, length in before), parts[own]], dim=2)


AttentionInterface.register(PACKED_ATTENTION, _attend)
