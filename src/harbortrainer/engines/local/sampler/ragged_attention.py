"""Attention over a paged cache for requests of different lengths, without a mask over the whole batch.

transformers' continuous batching on torch's SDPA scores every query against the keys of *all* requests and masks
the rest away, which is quadratic in the batch (measured: 64 requests of 300 tokens at 270 tokens/s, one core).
Here each request only meets its own keys: the requests that decode are padded to a few common lengths, those that
prefill go one by one. Those that decode after the same pages, as the trials of a group do, read these once on a CPU.

Contract: for full causal attention only; one plan serves every layer of a forward pass.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
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
_LEAST_SHARED = 4  # pages; below it a family costs more than it saves


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
class DecodeFamily:
    """Requests with one query each whose keys begin with the same pages.

    Attributes:
        shared: [S] pages of the cache that all of them begin with.
        own: What each of them has after these.
    """

    shared: torch.Tensor
    own: DecodeGroup


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
    families: list[DecodeFamily] = field(default_factory=list)


def make_plan(query_ends: list[int], key_ends: list[int], read_index: torch.Tensor, page_size: int) -> RaggedPlan:
    """Plans a forward pass.

    Args:
        query_ends: Cumulative number of queries, a leading 0 first.
        key_ends: Cumulative number of keys, a leading 0 first.
        read_index: [sum of keys] physical cache rows, request after request; empty when no request has a past.
        page_size: Rows in a page; a request fills its pages from the first row on.
    """
    lengths = [end - begin for begin, end in pairwise(key_ends)]
    alone: dict[int, list[int]] = {}
    prefilling: list[int] = []
    for i, (begin, end) in enumerate(pairwise(query_ends)):
        if end - begin == 1 and read_index.numel():
            alone.setdefault(_bucket(lengths[i]), []).append(i)
        else:
            prefilling.append(i)
    families: list[DecodeFamily] = []
    for members in alone.values() if read_index.device.type == "cpu" else ():
        for kin, shared in _kin(members, key_ends, read_index, page_size):
            common = read_index[key_ends[kin[0]] :][: shared * page_size : page_size] // page_size
            own = _decode_group(kin, query_ends, key_ends, read_index, page_size, after=shared * page_size)
            families.append(DecodeFamily(common, own))
            members[:] = sorted(set(members) - set(kin))
    groups = [_decode_group(m, query_ends, key_ends, read_index, page_size) for m in alone.values() if m]
    reads: list[torch.Tensor] = []
    prefills = [_prefill_row(i, query_ends, key_ends, read_index, reads) for i in prefilling]
    return RaggedPlan(torch.cat(reads) if reads else read_index[:0], groups, prefills, families)


def _kin(members: list[int], key_ends: list[int], read_index: torch.Tensor, page: int) -> list[tuple[list[int], int]]:
    """Requests that have at least half of the shortest one's pages in common, and how many pages that is."""
    tables = {i: (read_index[key_ends[i] : key_ends[i + 1] : page] // page).tolist() for i in members}
    found: list[tuple[list[int], int]] = []
    open_: list[tuple[list[int], int]] = [(list(members), 0)]
    while open_:
        of, known = open_.pop()
        if len(of) < 2:
            continue
        # What is in a page is a page's whole past: who shares one shares all before it. The last is never shared.
        least = min(len(tables[i]) for i in of) - 1
        shared = bisect_left(range(known, least), True, key=lambda at: len({tables[i][at] for i in of}) > 1) + known
        if shared >= max(_LEAST_SHARED, (least + 1) // 2):
            found.append((of, shared))
            continue
        parts: dict[int, list[int]] = {}
        for i in of:
            parts.setdefault(tables[i][shared], []).append(i)
        open_ += [(part, shared + 1) for part in parts.values() if len(part) < len(of)]
    return found


def _bucket(length: int) -> int:
    """The smallest of 32, 64, 128, ... that holds `length`: requests of one bucket are padded together."""
    return max(_MIN_BUCKET, 1 << (length - 1).bit_length())


def _decode_group(
    members: list[int],
    query_ends: list[int],
    key_ends: list[int],
    read_index: torch.Tensor,
    page_size: int,
    *,
    after: int = 0,
) -> DecodeGroup:
    """Args: `after`, how many keys of each are left out at its beginning."""
    device = read_index.device
    ends = torch.tensor([(key_ends[i] + after, key_ends[i + 1]) for i in members], device=device)
    begins, lengths = ends[:, 0], ends[:, 1] - ends[:, 0]
    width = -(-max(key_ends[i + 1] - key_ends[i] - after for i in members) // page_size) * page_size
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
    for family in plan.families:
        rows = family.own.rows
        q = flat[rows].view(len(rows), groups, heads // groups, dim)
        out[rows] = _attend_family(family, q, paged, scaling).reshape(len(rows), heads, -1).to(out.dtype)
    for row in plan.prefills:
        q = flat[row.begin : row.end].transpose(0, 1)[None]
        k, v = (x[row.start : row.start + row.length].transpose(0, 1)[None] for x in read)
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=row.mask, is_causal=row.mask is None, scale=scaling, enable_gqa=heads != groups
        )
        out[row.begin : row.end] = attended[0].transpose(0, 1)
    return out[None]


def _attend_family(
    family: DecodeFamily, query: torch.Tensor, paged: tuple[torch.Tensor, torch.Tensor], scaling: float | None
) -> torch.Tensor:
    """One softmax over what all have in common and what each has of its own; [B, G, H / G, D] to the same, float32."""
    size, groups, each, dim = query.shape
    q = query.float() * (dim**-0.5 if scaling is None else scaling)
    # [G, S, D] of all, [B, G, W, D] of each
    keys, values = (x.index_select(0, family.shared).flatten(0, 1).transpose(0, 1).float() for x in paged)
    own_keys, own_values = (
        x.index_select(0, family.own.pages).view(size, -1, groups, dim).transpose(1, 2).float() for x in paged
    )
    common = q.transpose(0, 1).reshape(groups, size * each, dim) @ keys.transpose(1, 2)
    own = (q @ own_keys.transpose(2, 3)).masked_fill(~family.own.real, -torch.inf)
    scores = torch.cat([common.view(groups, size, each, -1).transpose(0, 1), own], dim=-1).softmax(-1)
    common, own = scores.split([keys.shape[1], own.shape[-1]], dim=-1)
    attended = common.transpose(0, 1).reshape(groups, size * each, -1) @ values
    return attended.view(groups, size, each, dim).transpose(0, 1) + own @ own_values


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
