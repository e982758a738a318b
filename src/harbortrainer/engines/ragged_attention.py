"""Attention over a paged cache for requests of different lengths, without a mask over the whole batch.

transformers' continuous batching on torch's SDPA scores every query against the keys of *all* requests and masks
the rest away, which is quadratic in the batch (measured: 64 requests of 300 tokens at 270 tokens/s, one core).
Here each request only meets its own keys, by the plan of the forward pass (`ragged_plan`). What a request attends in
pages that it shares with others, which are read once, and what it attends in its own pages is put together by the sums
of their softmaxes.

Contract: the plan's.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from harbortrainer.engines.grouped_attention import attend_in_groups
from harbortrainer.engines.ragged_plan import Bundle, PrefillRow, RaggedPlan, whole_sequences

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

# transformers builds no mask for a name it does not know.
RAGGED_ATTENTION = "ragged"
# SDPA for a CPU, which also tells the logarithm of each softmax's sum.
_attend_and_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_NOTHING = torch.empty(0, dtype=torch.long)


def attend(
    plan: RaggedPlan,
    query: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    paged: tuple[torch.Tensor, torch.Tensor] | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attends, each request to its own keys.

    Args:
        query: [1, H, Q, D], all requests one after the other.
        own: The batch's own keys and values, [Q, G, D]; H is a multiple of G.
        paged: Keys and values of the whole cache, these included, [pages, page size, G, D]; None where no request of
            the plan reads them.

    Returns:
        [1, Q, H, D].
    """
    heads, groups = query.shape[1], own[0].shape[1]
    flat = query[0].transpose(0, 1)  # [Q, H, D]
    out = flat.new_empty(flat.shape[0], heads, own[1].shape[-1])
    for bundle in plan.bundles:
        assert paged is not None
        attended = _attend_bundle(bundle, flat.index_select(0, bundle.rows), groups, paged, scaling)
        out.index_copy_(0, bundle.rows, attended.to(out.dtype))
    for row in plan.prefills:
        q = flat[row.begin : row.end].transpose(0, 1)[None]
        k, v = (x.transpose(0, 1)[None] for x in _keys_of(row, own, paged))
        attended = attend_in_groups(q, k, v, row.mask, scaling)
        out[row.begin : row.end] = attended[0].transpose(0, 1)
    return out[None]


def _keys_of(
    row: PrefillRow, own: tuple[torch.Tensor, torch.Tensor], paged: tuple[torch.Tensor, torch.Tensor] | None
) -> list[torch.Tensor]:
    """Keys and values that a prefill meets, [K, G, D]."""
    if row.pages is None or row.mask is None:
        return [x[row.begin : row.end] for x in own]
    assert paged is not None
    return [x.index_select(0, row.pages).flatten(0, 1)[: row.mask.shape[-1]] for x in paged]


def _attend_bundle(
    bundle: Bundle,
    query: torch.Tensor,
    groups: int,
    paged: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:
    """[F * M * Q, H, D] to the same."""
    families, members, queries = bundle.size
    count, heads, dim = query.shape
    each = heads // groups
    q = query.view(-1, queries, groups, each, dim).transpose(1, 2).reshape(-1, groups, queries * each, dim)
    k, v = (x.index_select(0, bundle.own).view(len(q), -1, groups, dim).transpose(1, 2) for x in paged)
    if bundle.shared is None:
        attended = scaled_dot_product_attention(q, k, v, attn_mask=bundle.real, scale=scaling)
    else:
        q = q.float()
        attended, near = _attend_and_sum(q, k.float(), v.float(), 0.0, False, attn_mask=bundle.real, scale=scaling)
        # [F, G, M * Q * E, D] of queries, [F, G, S, D] of keys: once for all of a family
        q = q.view(families, members, groups, -1, dim).transpose(1, 2).reshape(families, groups, -1, dim)
        k, v = (x.index_select(0, bundle.shared).view(families, -1, groups, dim).transpose(1, 2).float() for x in paged)
        common, far = _attend_and_sum(q, k, v, 0.0, False, attn_mask=bundle.common, scale=scaling)
        common = common.view(families, groups, members, -1, dim).transpose(1, 2).reshape(attended.shape)
        far = far.reshape(families, groups, members, -1).transpose(1, 2).reshape(near.shape)
        attended = common.lerp(attended, (near - far).sigmoid()[..., None])
    return attended.reshape(-1, groups, queries, each, dim).transpose(1, 2).reshape(count, heads, dim)


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
    own = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if cache is None or ragged_plan is None:
        return attend(ragged_plan or whole_sequences([query.shape[2]]), query, own, None, scaling), None
    layer = cast("int", module.layer_idx)
    allocator = cache.layer_to_allocator[layer]
    allocator.update(*own, layer, _NOTHING, write_index[allocator.index])
    return attend(ragged_plan, query, own, allocator.get_cache_for_block_table(layer), scaling), None


AttentionInterface.register(RAGGED_ATTENTION, _ragged_attention)
