"""Operations that a CUDA graph cannot hold, since the CPU waits for a number or a shape that is in their result.

Contract: what is computed stays what it is. What is only a copy to the CPU is not seen.
"""

import torch
from torch._ops import OpOverload

from harbortrainer.couplings import Couplings

COUPLINGS = Couplings("torch", "2.15", __name__, ("torch.utils._python_dispatch:TorchDispatchMode",))
COUPLINGS.check()

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 (not before the check)

_ATEN = torch.ops.aten
_WAITS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
_UNTAGGED = {
    # Put together from others, which in inference mode are not seen one by one.
    _ATEN.is_nonzero.default, _ATEN.where.default, _ATEN.repeat_interleave.self_Tensor,
    # A number of Python's is copied to the GPU first.
    _ATEN.where.Scalar, _ATEN.where.ScalarOther, _ATEN.where.ScalarSelf,
}  # fmt: skip
_INDEXING = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_}
"""Tagged or not, whatever the index is; only one of true and false is counted first."""


class Waits(TorchDispatchMode):
    """Watches what the thread that enters it computes.

    Attributes:
        named: The last one, "" for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.named = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _waits(func, args):
            self.named = str(func)
        return func(*args, **(kwargs or {}))


def _waits(func: OpOverload, args: tuple) -> bool:
    if func.overloadpacket in _INDEXING:
        return any(index.dtype is torch.bool for index in args[1] if index is not None)
    return func in _UNTAGGED or any(tag in func.tags for tag in _WAITS)
