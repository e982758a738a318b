"""All that goes behind peft's public surface: the layers it puts into a model, their weights' names, their forward.

Written for peft `WRITTEN_FOR`; `COUPLINGS` lists what is touched, and is checked before the first use.
"""

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

from harbortrainer.couplings import Couplings, places_in
from harbortrainer.engines.block_product import multiply, pays
from harbortrainer.errors import UserError

WRITTEN_FOR = "0.21"
_USED = {
    "peft": "inject_adapter_in_model(peft_config, model, adapter_name, ...)",
    "peft.tuners.lora:Linear": "forward(x, ...); base_layer; lora_A; lora_B; lora_dropout; scaling",
}
COUPLINGS = Couplings("peft", WRITTEN_FOR, __name__, places_in(_USED))
COUPLINGS.check()

from peft.tuners.lora import Linear  # noqa: E402 (not before the check)


def adapter_weights(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """The weights of one adapter by the names under which peft saves them."""
    marker = f".{adapter}."
    return {
        name.replace(marker, "."): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name and marker in name
    }


def inject_for_training(base: PreTrainedModel, config: LoraConfig) -> tuple[PeftModel, list[nn.Dropout]]:
    """Puts a LoRA's layers into `base`, named "default", with weights of its dtype; they compute what those of
    `inject_for_sampling` do, operation by operation, so that both sides round alike.

    Returns:
        The model as peft wraps it, and the dropouts on the LoRA's input, none when the config's dropout is 0.

    Raises:
        UserError: peft adapts a model's stacked experts in place of the linear layers that were named.
    """
    with warnings.catch_warnings():
        # peft asks transformers by a name that is on its way out.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        try:
            model = get_peft_model(base, config)
        except ValueError as error:
            if "fused" not in str(error):
                raise
            raise _experts_instead() from error  # of two that it would adapt as one, one was named
    if config.target_parameters:
        raise _experts_instead()
    assert isinstance(model, PeftModel)
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
    """What peft's `lora.Linear.forward` computes, in the operations of `_add_lora`."""
    rows, out = dropout(x).reshape(-1, x.shape[-1]), base(x)
    narrow = rows.to(down.weight.dtype).mm(down.weight.t())
    flat = out.reshape(-1, out.shape[-1])
    if out.dtype == up.weight.dtype:
        flat = torch.addmm(flat, narrow, up.weight.t(), alpha=scaling)
    else:
        flat = torch.add(flat, narrow.mm(up.weight.t()), alpha=scaling)
    return flat.view(out.shape)


def _experts_instead() -> UserError:
    """Of the mixtures of experts that transformers stacks since its version 5, an older adapter named each expert's
    layers as these models' dense ones are named still: peft takes the names for those."""
    return UserError(
        "peft adapts this model's stacked experts in place of layers of these names",
        where="trainer.model.lora.target_modules",
        do="leave out gate_proj, up_proj and down_proj: name the attention's layers alone",
    )


_CHOSEN: ContextVar[str | None] = ContextVar("adapter", default=None)


@contextmanager
def sampling_with(adapter: str | None) -> Generator[None]:
    """Which of the adapters that `inject_for_sampling` put into a model this thread computes with; None is the base."""
    token = _CHOSEN.set(adapter)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def inject_for_sampling(
    model: nn.Module, config: LoraConfig, adapter: str, dtype: torch.dtype
) -> dict[str, nn.Parameter]:
    """Puts a LoRA's layers into `model`, without gradients, beside those that are there; `sampling_with` chooses. Large
    layers are multiplied block by block, the output matrix among them.

    Args:
        dtype: Of the LoRA: what the model computes in, as in the learner.

    Returns:
        Their weights as `adapter_weights` names them.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)  # several are what we want
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
        elif type(module) is nn.Linear and module.bias is None and pays(module.weight):
            module.forward = partial(_each_row, _product(module))
    return weights


def _product(base: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What `base` makes of a matrix; without the way through the module where it is one product."""
    if type(base) is not nn.Linear or base.bias is not None:
        return base.forward
    if pays(base.weight):
        return partial(multiply, weight=base.weight)
    return partial(torch.mm, mat2=base.weight.t())


def _each_row(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _add_lora(
    base: nn.Module,
    product: Callable[[torch.Tensor], torch.Tensor],
    adapters: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]],
    x: torch.Tensor,
) -> torch.Tensor:
    """What peft's `lora.Linear.forward` computes for one active adapter, without its bookkeeping: on a small model
    that was a quarter of a step (forward pass of 64 tokens, 0.7 M parameters: 2.3 ms instead of 2.0), and to find the
    weights module by module each time another tenth. On matrices it is three operations of torch; on what has more
    dimensions each of them was six.

    Args:
        product: As `_product` makes it of `base`.
        adapters: Of each its two matrices, transposed, and what their product is scaled by.
    """
    adapter = _CHOSEN.get()
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
