"""Attention over a paged cache for requests of different lengths, without a mask over the whole batch.

With torch's SDPA, transformers' continuous batching scores every query against the keys of *all* requests and masks the
others. That is quadratic in the batch (measured: 64 requests of 300 tokens at 270 tokens/s on one core). Here each
request attends to its own keys only, following the forward pass's plan (`attention.plan`). Shared prefixes and own
pages are attended separately, and combined by their softmax denominators.

The contract of `attention.plan` holds here too.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from harbortrainer.engines.attention.packed import Segment, attend_in_groups, packed_attention
from harbortrainer.engines.attention.plan import Batch, PrefillRow, RaggedPlan

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

# transformers builds no mask for a name it does not know.
RAGGED_ATTENTION = "ragged"
# SDPA for CPUs that also returns the log-sum-exp of the scores.
_attend_with_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_NO_READ_INDEX = torch.empty(0, dtype=torch.long)


def attend(
    plan: RaggedPlan,
    query: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    paged: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:
    """Compute the attention of each request to its own keys.

    Args:
        query: [1, H, Q, D], all requests concatenated.
        own: Keys and values of the batch's tokens, [Q, G, D]; H is a multiple of G.
        paged: Keys and values of the whole cache, including these tokens, [pages, page size, G, D].

    Returns:
        [1, Q, H, D].
    """
    heads, groups = query.shape[1], own[0].shape[1]
    flat = query[0].transpose(0, 1)  # [Q, H, D]
    out = flat.new_empty(flat.shape[0], heads, own[1].shape[-1])
    for batch in plan.batches:
        attended = _attend_batch(batch, flat.index_select(0, batch.rows), groups, paged, scaling)
        out.index_copy_(0, batch.rows, attended.to(out.dtype))
    for row in plan.prefills:
        q = flat[row.begin : row.end].transpose(0, 1)[None]
        k, v = (x.transpose(0, 1)[None] for x in _prefill_keys(row, own, paged))
        attended = attend_in_groups(q, k, v, row.mask, scaling)
        out[row.begin : row.end] = attended[0].transpose(0, 1)
    return out[None]


def _prefill_keys(
    row: PrefillRow, own: tuple[torch.Tensor, torch.Tensor], paged: tuple[torch.Tensor, torch.Tensor]
) -> list[torch.Tensor]:
    """Return the keys and values of a prefill, [K, G, D] each."""
    if row.pages is None or row.mask is None:
        return [x[row.begin : row.end] for x in own]
    return [x.index_select(0, row.pages).flatten(0, 1)[: row.mask.shape[-1]] for x in paged]


def _attend_batch(
    batch: Batch,
    query: torch.Tensor,
    kv_heads: int,
    paged: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:
    """Compute the attention of a batch; `query` and the result are [P * R * Q, H, D]."""
    groups, requests, queries = batch.size
    count, heads, dim = query.shape
    heads_per_kv = heads // kv_heads
    q = query.view(-1, queries, kv_heads, heads_per_kv, dim).transpose(1, 2)
    q = q.reshape(-1, kv_heads, queries * heads_per_kv, dim)
    k, v = (x.index_select(0, batch.own_pages).view(len(q), -1, kv_heads, dim).transpose(1, 2) for x in paged)
    if batch.prefix_pages is None:
        attended = scaled_dot_product_attention(q, k, v, attn_mask=batch.own_mask, scale=scaling)
    else:
        q = q.float()
        mask = batch.own_mask
        attended, own_lse = _attend_with_lse(q, k.float(), v.float(), 0.0, False, attn_mask=mask, scale=scaling)
        # Queries are [P, G, R * Q * E, D] and keys [P, G, S, D]: a group's prefix is read once.
        q = q.view(groups, requests, kv_heads, -1, dim).transpose(1, 2).reshape(groups, kv_heads, -1, dim)
        k, v = (
            x.index_select(0, batch.prefix_pages).view(groups, -1, kv_heads, dim).transpose(1, 2).float() for x in paged
        )
        prefix, prefix_lse = _attend_with_lse(q, k, v, 0.0, False, attn_mask=batch.prefix_mask, scale=scaling)
        prefix = prefix.view(groups, kv_heads, requests, -1, dim).transpose(1, 2).reshape(attended.shape)
        prefix_lse = prefix_lse.reshape(groups, kv_heads, requests, -1).transpose(1, 2).reshape(own_lse.shape)
        attended = prefix.lerp(attended, (own_lse - prefix_lse).sigmoid()[..., None])
    return attended.reshape(-1, kv_heads, queries, heads_per_kv, dim).transpose(1, 2).reshape(count, heads, dim)


def _ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_cache: "PagedAttentionCache | None" = None,
    ragged_plan: RaggedPlan | None = None,
    segments: Sequence[Segment] | None = None,
    write_index: Sequence[torch.Tensor] = (),
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values to the cache, then attend by the plan; an attention function for transformers.

    Without a cache it is packed attention (`rescoring`).

    Args:
        query: [1, H, Q, D], all requests concatenated.
        key, value: [1, G, Q, D]; H is a multiple of G.

    Returns:
        [1, Q, H, D], and None in place of attention weights.
    """
    if paged_cache is None or ragged_plan is None:
        return packed_attention(module, query, key, value, attention_mask, segments=segments, scaling=scaling)
    own = key[0].transpose(0, 1), value[0].transpose(0, 1)
    layer = cast("int", module.layer_idx)
    allocator = paged_cache.layer_to_allocator[layer]
    allocator.update(*own, layer, _NO_READ_INDEX, write_index[allocator.index])
    return attend(ragged_plan, query, own, allocator.get_cache_for_block_table(layer), scaling), None


AttentionInterface.register(RAGGED_ATTENTION, _ragged_attention)
