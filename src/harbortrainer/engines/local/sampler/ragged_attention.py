"""Attention over a paged cache for requests of different lengths, without a mask over the whole batch.

transformers' continuous batching on torch's SDPA scores every query against the keys of *all* requests and masks
the rest away, which is quadratic in the batch (measured: 64 requests of 300 tokens at 270 tokens/s, one core).
Here each request only meets its own keys: the requests that decode are padded to a few common lengths, those that
prefill go one by one.

Contract: for full causal attention only; one plan serves every layer of a forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

# transformers builds no mask for a name it does not know.
RAGGED_ATTENTION = "ragged"
_MIN_BUCKET = 32


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests with one query each, padded to a common number of pages.

    Attributes:
        rows: [B] positions of their queries in the flat batch.
        pages: [B * W] pages of the cache that hold their keys, W for each.
        real: [B, 1, 1, W * page size] True where a key is the request's own.
    """

    rows: torch.Tensor
    pages: torch.Tensor
    real: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One request with more than one query.

    Attributes:
        begin, end: Its queries in the flat batch.
        start, length: Its keys in what is read from the cache.
        mask: [Q, K] True where a query may look; None when it has no past (plain causal).
    """

    begin: int
    end: int
    start: int
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """What one forward pass reads, the same in every layer.

    Attributes:
        read: [R] physical cache rows that the prefills read; empty when none has a past.
    """

    read: torch.Tensor
    groups: list[DecodeGroup]
    prefills: list[PrefillRow]


def make_plan(query_ends: list[int], key_ends: list[int], read_index: torch.Tensor, page_size: int) -> RaggedPlan:
    """Plans a forward pass.

    Args:
        query_ends: Cumulative number of queries, a leading 0 first.
        key_ends: Cumulative number of keys, a leading 0 first.
        read_index: [sum of keys] physical cache rows, request after request; empty when no request has a past.
        page_size: Rows in a page; a request fills its pages from the first row on.
    """
    decoding: dict[int, list[int]] = {}
    prefilling: list[int] = []
    for i in range(len(query_ends) - 1):
        if query_ends[i + 1] - query_ends[i] == 1 and read_index.numel():
            decoding.setdefault(_bucket(key_ends[i + 1] - key_ends[i]), []).append(i)
        else:
            prefilling.append(i)
    reads: list[torch.Tensor] = []
    groups = [_decode_group(m, query_ends, key_ends, read_index, page_size) for m in decoding.values()]
    prefills = [_prefill_row(i, query_ends, key_ends, read_index, reads) for i in prefilling]
    return RaggedPlan(torch.cat(reads) if reads else read_index[:0], groups, prefills)


def _bucket(length: int) -> int:
    """The smallest of 32, 64, 128, ... that holds `length`: requests of one bucket are padded together."""
    return max(_MIN_BUCKET, 1 << (length - 1).bit_length())


def _decode_group(
    members: list[int], query_ends: list[int], key_ends: list[int], read_index: torch.Tensor, page_size: int
) -> DecodeGroup:
    device = read_index.device
    ends = torch.tensor([(key_ends[i], key_ends[i + 1]) for i in members], device=device)
    begins, lengths = ends[:, 0], ends[:, 1] - ends[:, 0]
    width = -(-max(key_ends[i + 1] - key_ends[i] for i in members) // page_size) * page_size
    columns = torch.arange(width, device=device)
    real = columns < lengths[:, None]
    # Padding reads the request's own first page again, whose scores are masked away.
    starts = columns[::page_size]
    pages = read_index[begins[:, None] + starts * (starts < lengths[:, None])] // page_size
    rows = torch.tensor([query_ends[i] for i in members], device=device)
    return DecodeGroup(rows, pages.flatten(), real[:, None, None, :])


def _prefill_row(
    i: int, query_ends: list[int], key_ends: list[int], read_index: torch.Tensor, reads: list[torch.Tensor]
) -> PrefillRow:
    begin, end = query_ends[i], query_ends[i + 1]
    queries, keys = end - begin, key_ends[i + 1] - key_ends[i]
    if not read_index.numel():
        return PrefillRow(begin, end, begin, queries, None)
    start = sum(r.numel() for r in reads)
    reads.append(read_index[key_ends[i] : key_ends[i + 1]])
    mask = None
    if keys > queries:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=read_index.device).tril(keys - queries)
    return PrefillRow(begin, end, start, keys, mask)


def whole_sequences(lengths: Sequence[int]) -> RaggedPlan:
    """The plan of sequences of these lengths, one after the other, each of which attends to itself alone."""
    ends = [0, *accumulate(lengths)]
    rows = [PrefillRow(begin, end, begin, end - begin, None) for begin, end in pairwise(ends)]
    return RaggedPlan(torch.empty(0, dtype=torch.long), [], rows)


def attend(
    plan: RaggedPlan,
    query: torch.Tensor,
    read: tuple[torch.Tensor, torch.Tensor],
    paged: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:
    """Attends, each request to its own keys.

    Args:
        query: [1, H, Q, D], all requests one after the other.
        read: Keys and values, [R, G, D], at the rows of `plan.read`; the batch's own where that is empty.
        paged: Keys and values of the whole cache, [pages, page size, G, D]; H is a multiple of G.

    Returns:
        [1, Q, H, D].
    """
    heads, groups, dim = query.shape[1], read[0].shape[1], query.shape[3]
    flat = query[0].transpose(0, 1)  # [Q, H, D]
    out = flat.new_empty(flat.shape[0], heads, read[1].shape[-1])
    for group in plan.groups:
        size = group.rows.shape[0]
        q = flat[group.rows].view(size, groups, heads // groups, dim)
        k, v = (x.index_select(0, group.pages).view(size, -1, groups, dim).transpose(1, 2) for x in paged)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=group.real, scale=scaling)
        out[group.rows] = attended.reshape(size, heads, -1)
    for row in plan.prefills:
        q = flat[row.begin : row.end].transpose(0, 1)[None]
        k, v = (x[row.start : row.start + row.length].transpose(0, 1)[None] for x in read)
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=row.mask, is_causal=row.mask is None, scale=scaling, enable_gqa=heads != groups
        )
        out[row.begin : row.end] = attended[0].transpose(0, 1)
    return out[None]


def _ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cache: "PagedAttentionCache | None" = None,
    ragged_plan: RaggedPlan | None = None,
    write_index: Sequence[torch.Tensor] = (),
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers': writes the new keys and values to the cache, then attends by the plan.

    Without a cache each sequence of the plan meets its own keys alone (`rescoring`); without a plan too, it is one.

    Args:
        query: [1, H, Q, D], all requests one after the other.
        key, value: [1, G, Q, D]; H is a multiple of G.

    Returns:
        [1, Q, H, D], and None for the weights.
    """
    if cache is None or ragged_plan is None:
        own = key[0].transpose(0, 1), value[0].transpose(0, 1)
        return attend(ragged_plan or whole_sequences([query.shape[2]]), query, own, own, scaling), None
    layer = cast("int", module.layer_idx)
    allocator = cache.layer_to_allocator[layer]
    read = allocator.update(
        key[0].transpose(0, 1), value[0].transpose(0, 1), layer, ragged_plan.read, write_index[allocator.index]
    )
    return attend(ragged_plan, query, read, allocator.get_cache_for_block_table(layer), scaling), None


AttentionInterface.register(RAGGED_ATTENTION, _ragged_attention)
