"""Matrix products on a CPU in blocks of the weight, for decoding.

Decoding multiplies a few rows by a large weight. torch's library takes about twice as long for the whole product as for
blocks that fit into the processor's cache.

Contract: the same product (bit-identical where it was measured), and no memory besides the result.
"""

import torch
from torch import Tensor

_BLOCK_ROWS = 256
"""Rows of the weight per block."""
_MIN_WEIGHT_BYTES = 32 * 2**20
"""Smaller weights are not faster in blocks."""
_MAX_INPUT_ROWS = 256
"""For more input rows the library's own blocking is as fast."""


def is_faster_in_blocks(weight: Tensor) -> bool:
    """Whether blocks may be faster for this weight."""
    return weight.device.type == "cpu" and weight.dtype is torch.float32 and weight.nbytes > _MIN_WEIGHT_BYTES


def multiply(rows: Tensor, weight: Tensor) -> Tensor:
    """Compute `rows @ weight.T` without gradients; [n, K] and [N, K] to [n, N]."""
    if len(rows) > _MAX_INPUT_ROWS:
        return rows.mm(weight.t())
    out = rows.new_empty(len(rows), len(weight))
    for begin in range(0, len(weight), _BLOCK_ROWS):
        torch.mm(rows, weight[begin : begin + _BLOCK_ROWS].t(), out=out[:, begin : begin + _BLOCK_ROWS])
    return out
