"""torch's attention, where several heads of the queries share a head of the keys.

Contract: what `scaled_dot_product_attention` computes, and never by torch's own way for all that no kernel takes: on a
GPU that makes a score for each pair of tokens and head, 9 GB for 4 096 tokens behind 28 672 in Qwen3-8B.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_ANY_KERNEL_GROUPS = torch.__version__ >= "2.15"
"""Before, flash attention alone took shared heads, and it takes neither a mask nor float32."""
_WIDEST = 256
"""Numbers of a head, with which a kernel of a GPU takes shared heads."""


def attend_in_groups(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attends.

    Args:
        query: [B, H, Q, D].
        key, value: [B, G, K, D]; H is a multiple of G.
        mask: [Q, K], true where a query may look, or added to the scores; None for causal attention over Q = K.

    Returns:
        [B, H, Q, D].
    """
    each = query.shape[1] // key.shape[1]
    if each > 1 and not _taken(query, mask):
        key, value = (x.repeat_interleave(each, dim=1) for x in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def _taken(query: Tensor, mask: Tensor | None) -> bool:
    """Whether shared heads have a kernel."""
    if query.device.type != "cuda":
        return True
    flash = mask is None and query.dtype is not torch.float32
    return query.shape[-1] <= _WIDEST and (flash or _ANY_KERNEL_GROUPS)
