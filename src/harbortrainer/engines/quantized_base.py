"""A quantized base: linear layers in 8 or 4 bits, in bitsandbytes' formats, always computed in the same way.

`int8` has one scale per row, as in LLM.int8() (Dettmers et al. 2022). `nf4` has one scale per 64 weights, as in QLoRA
(Dettmers et al. 2023). Embeddings, norms, the output matrix and the adapter are not quantized.

Every pass dequantizes a whole layer and multiplies, with or without gradients and for any number of rows.
The layers of bitsandbytes distinguish these cases, so that sampler and learner would be different policies.

    - Its 4-bit layer, on a CPU with AVX-512 BF16, repacks the weight in place at the first pass without gradients. From
      then on it computes in bfloat16, without gradients for its input.
    - Its 8-bit layer rounds activations too. Which columns stay exact depends on the other requests in the batch.

The price is the speed of bitsandbytes' kernels for single rows.

The tensors are frozen parameters, so sharing a model's parameters shares them too.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from harbortrainer.config.runfile import Quantization
from harbortrainer.engines.engine_choice import QUANTIZATION, require_bitsandbytes
from harbortrainer.errors import UserError

if TYPE_CHECKING:
    from types import ModuleType

BLOCK = 64
"""Weights per scale in `nf4`. A layer whose input width is not a multiple of it is not quantized."""
_INT8_MAX = 127


def quantize(model: PreTrainedModel, scheme: Quantization, device: torch.device) -> None:
    """Replace the linear layers by `QuantizedLinear`, and move them to the device.

    Layers are replaced one by one, so at most one unquantized layer is on the device. The rest of the model is not
    moved.

    Args:
        model: As loaded, or on torch's meta device.
        scheme: "int8" or "nf4".
        device: The device for the quantized weights.

    Raises:
        UserError: bitsandbytes is missing, or no layer can be quantized.
    """
    require_bitsandbytes()
    head = model.get_output_embeddings()
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and layer is not head}
    chosen = {name: layer for name, layer in layers.items() if layer.in_features % BLOCK == 0}
    if not chosen:
        raise UserError("the model has no linear layer that can be quantized", where=QUANTIZATION, do="leave it out")
    for name, layer in chosen.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, QuantizedLinear(layer, scheme, device))


def largest_layer(model: nn.Module) -> int:
    """Return the number of weights of the largest quantized layer, all dequantized at once; 0 if there is none."""
    sizes = [m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantizedLinear)]
    return max(sizes, default=0)


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen, quantized weight. It subclasses `nn.Linear`, so peft adapts it like any other.

    Attributes:
        weight: `int8`: [out, in] int8; `nf4`: [out * in / 2, 1] uint8, two weights per byte.
        scale: `int8`: [out, 1] float32; `nf4`: [out * in / 64] float32.
    """

    def __init__(self, layer: nn.Linear, scheme: Quantization, device: torch.device) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate the full weight
        self.in_features, self.out_features, self.scheme = layer.in_features, layer.out_features, scheme
        codes, scale = _quantized(layer.weight.detach().to(device), scheme)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().to(device), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer, [..., in] to [..., out], in the input's dtype."""
        product = cast("Tensor", _Product.apply(input, self))
        return product if self.bias is None else product + self.bias

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] that the layer computes with."""
        codes, scale = self.weight, self.scale
        if self.scheme == "int8":
            return codes.to(dtype).mul_(scale)
        library, shape = _bitsandbytes(), torch.Size((self.out_features, self.in_features))
        state = library.QuantState(scale, shape=shape, dtype=dtype, blocksize=BLOCK, quant_type="nf4")
        return library.dequantize_4bit(codes, state)


class _Product(torch.autograd.Function):
    """x W^T. The backward pass dequantizes again, so that no dequantized weight is kept for it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer  # ty: ignore[missing-attribute]
        return linear(x, layer.dequantized(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        layer = cast("QuantizedLinear", ctx.layer)  # ty: ignore[missing-attribute]
        return gradient @ layer.dequantized(gradient.dtype), None


def _quantized(weight: Tensor, scheme: Quantization) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a weight [out, in]."""
    if weight.is_meta:
        shapes = (
            (weight.shape, (len(weight), 1))
            if scheme == "int8"
            else ((weight.numel() // 2, 1), weight.numel() // BLOCK)
        )
        codes = torch.empty(shapes[0], dtype=torch.int8 if scheme == "int8" else torch.uint8, device="meta")
        return codes, torch.empty(shapes[1], dtype=torch.float32, device="meta")
    if scheme == "int8":
        codes, largest, _ = _bitsandbytes().int8_vectorwise_quant(weight.half())
        return codes, (largest / _INT8_MAX)[:, None]
    codes, state = _bitsandbytes().quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    return codes, state.absmax


def _bitsandbytes() -> "ModuleType":
    import bitsandbytes.functional

    return bitsandbytes.functional
