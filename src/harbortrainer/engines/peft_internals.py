"""All uses of peft's private API: its LoRA layers, the names of their weights, and their forward pass.

Written for peft `WRITTEN_FOR`. `PRIVATE_APIS` lists what is used and is checked on import.
"""

import re
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import PreTrainedModel

from harbortrainer.engines.block_product import is_faster_in_blocks, multiply
from harbortrainer.errors import UserError
from harbortrainer.private_apis import PrivateApi, places_in

WRITTEN_FOR = "0.21"
_USED = {
    "peft": "inject_adapter_in_model(peft_config, model, adapter_name, ...)",
    "peft.tuners.lora:Linear": "forward(x, ...); base_layer; lora_A; lora_B; lora_dropout; scaling",
}
PRIVATE_APIS = PrivateApi("peft", WRITTEN_FOR, __name__, places_in(_USED))
PRIVATE_APIS.check()

from peft.tuners.lora import Linear  # noqa: E402 (not before the check)


def adapter_weights(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Return one adapter's weights by the names under which peft saves them."""
    marker = f".{adapter}."
    return {
        name.replace(marker, "."): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name and marker in name
    }


def wrap_base(base: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Return `base` with a LoRA named "default", as peft wraps it."""
    with warnings.catch_warnings():
        # peft uses a deprecated name of transformers.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        model = get_peft_model(base, config)
    assert isinstance(model, PeftModel)
    return model


def inject_for_training(base: PreTrainedModel, config: LoraConfig) -> tuple[PeftModel, list[nn.Dropout]]:
    """Add a LoRA named "default" to `base`, with weights in its dtype.

    Its layers run the same operations as the layers of `inject_for_sampling`, so that both sides round alike.

    Returns:
        The model as peft wraps it, and the dropouts on the LoRA's input (none if the config's dropout is 0).

    Raises:
        UserError: peft would adapt the model's stacked experts instead of the named linear layers, or cannot adapt one.
    """
    try:
        model = wrap_base(base, config)
    except ValueError as error:
        if "fused" in str(error):  # only one of two layers that it would fuse was named
            raise _stacked_experts_error() from error
        if "Incompatible modules" not in str(error):
            raise
        names = ", ".join(re.findall(r"'(\w+)'", str(error).partition("Incompatible modules")[2].partition("}")[0]))
        what = f"peft cannot adapt these layers of {base.config.model_type}: {names}"
        raise UserError(what, where="trainer.model.lora.target_modules", do="leave them out") from error
    if config.target_parameters:
        raise _stacked_experts_error()
    for weight in adapter_weights(model, "default").values():
        weight.data = weight.data.to(base.dtype)
    dropouts: list[nn.Dropout] = []
    for module in base.modules():
        if type(module) is Linear:
            dropout = module.lora_dropout["default"]
            if isinstance(dropout, nn.Dropout):
                dropouts.append(dropout)
            down, up = (cast("nn.Linear", part["default"]) for part in (module.lora_A, module.lora_B))
            module.forward = partial(_train_lora, module.base_layer, dropout, down, up, module.scaling["default"])
    return model, dropouts


def _train_lora(
    base: nn.Module, dropout: nn.Module, down: nn.Linear, up: nn.Linear, scaling: float, x: torch.Tensor
) -> torch.Tensor:
    """Compute peft's `lora.Linear.forward` with the operations of `_add_lora`."""
    rows, out = dropout(x).reshape(-1, x.shape[-1]), base(x)
    narrow = rows.to(down.weight.dtype).mm(down.weight.t())
    flat = out.reshape(-1, out.shape[-1])
    if out.dtype == up.weight.dtype:
        flat = torch.addmm(flat, narrow, up.weight.t(), alpha=scaling)
    else:
        flat = torch.add(flat, narrow.mm(up.weight.t()), alpha=scaling)
    return flat.view(out.shape)


def _stacked_experts_error() -> UserError:
    """Build the error for a model whose experts transformers stacks (since its version 5).

    Older adapters named each expert's layers, and dense layers still have these names. peft maps the names to the
    stacked experts.
    """
    return UserError(
        "peft adapts this model's stacked experts instead of the layers with these names",
        where="trainer.model.lora.target_modules",
        do="leave out gate_proj, up_proj and down_proj: name the attention's layers alone",
    )


_ACTIVE_ADAPTER: ContextVar[str | None] = ContextVar("adapter", default=None)


@contextmanager
def use_adapter(adapter: str | None) -> Generator[None]:
    """Select, for this thread, one of the adapters added by `inject_for_sampling`; None for the base alone."""
    token = _ACTIVE_ADAPTER.set(adapter)
    try:
        yield
    finally:
        _ACTIVE_ADAPTER.reset(token)


def inject_for_sampling(
    model: nn.Module, config: LoraConfig, adapter: str, dtype: torch.dtype
) -> dict[str, nn.Parameter]:
    """Add a LoRA to `model`, without gradients; it may have several, and `use_adapter` selects one.

    Products with large weights, including the output matrix, are computed in blocks.

    Args:
        dtype: The LoRA's dtype: the one the model computes in, as in the learner.

    Returns:
        The LoRA's weights, by the names of `adapter_weights`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)  # several are intended
        inject_adapter_in_model(config, model, adapter_name=adapter)
    model.requires_grad_(False).eval()
    weights = adapter_weights(model, adapter)
    for weight in weights.values():
        weight.data = weight.data.to(dtype)
    for module in model.modules():
        if type(module) is Linear:
            adapters = {
                name: (
                    cast("torch.Tensor", down.weight).t(),
                    cast("torch.Tensor", module.lora_B[name].weight).t(),
                    module.scaling[name],
                )
                for name, down in module.lora_A.items()
            }
            module.forward = partial(_add_lora, module.base_layer, _product(module.base_layer), adapters)
        elif type(module) is nn.Linear and module.bias is None and is_faster_in_blocks(module.weight):
            module.forward = partial(_multiply_rows, _product(module))
    return weights


def _product(base: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that applies `base` to a matrix, bypassing the module's call overhead if it is one product."""
    if type(base) is not nn.Linear or base.bias is not None:
        return base.forward
    if is_faster_in_blocks(base.weight):
        return partial(multiply, weight=base.weight)
    return partial(torch.mm, mat2=base.weight.t())


def _multiply_rows(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _add_lora(
    base: nn.Module,
    product: Callable[[torch.Tensor], torch.Tensor],
    adapters: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]],
    x: torch.Tensor,
) -> torch.Tensor:
    """Compute peft's `lora.Linear.forward` for one adapter, without its bookkeeping.

    On a small model (0.7 M parameters, a forward pass of 64 tokens) peft's own forward takes 2.3 ms instead of 2.0.
    Flattening to matrices makes it three torch operations; with more dimensions each would be six.

    Args:
        product: The result of `_product(base)`.
        adapters: By name: the two matrices, transposed, and the scaling of their product.
    """
    adapter = _ACTIVE_ADAPTER.get()
    if adapter is None:
        return base.forward(x)
    down, up, scaling = adapters[adapter]
    rows = x.reshape(-1, x.shape[-1])
    out, narrow = product(rows), rows.to(down.dtype).mm(down)
    if out.dtype == up.dtype:
        out.addmm_(narrow, up, alpha=scaling)
    else:
        out.add_(narrow.mm(up), alpha=scaling)
    return out.view(*x.shape[:-1], -1)
