"""A matrix product on a CPU, block by block of the weight.

A few rows times a large weight, which is what decoding is, takes torch's library about twice as long in one go as in
blocks that stay in a processor's cache.

Contract: the same product (bit for bit, where it was measured), and no memory beside the result.
"""

import torch
from torch import Tensor

_BLOCK = 256
"""Rows of the weight."""
_LARGE = 32 * 2**20
"""Bytes of a weight; below it a block is no faster."""
_FEW = 256
"""Rows of what it is multiplied with; above it the library's own blocks are as good."""


def pays(weight: Tensor) -> bool:
    """Whether blocks may be faster for this weight."""
    return weight.device.type == "cpu" and weight.dtype is torch.float32 and weight.nbytes > _LARGE


def multiply(rows: Tensor, weight: Tensor) -> Tensor:
    """[n, K] and [N, K] to [n, N]: `rows @ weight.T`; without gradients."""
    if len(rows) > _FEW:
        return rows.mm(weight.t())
    out = rows.new_empty(len(rows), len(weight))
    for begin in range(0, len(weight), _BLOCK):
        torch.mm(rows, weight[begin : begin + _BLOCK].t(), out=out[:, begin : begin + _BLOCK])
    return out
