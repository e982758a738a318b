"""Every weight of a model, trained.

The optimizer steps float32 weights. Where the model computes in fewer bits these are a master copy beside it, and so
are their gradients: each micro batch's is added in float32, weight by weight as the backward pass gets to it, and after
a step the model gets the masters rounded. Of a float32 model they are the model's own.
"""

from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from harbortrainer.engines.local.learner.trained_policy import PolicyWeights, TrainedPolicy
from harbortrainer.engines.pretrained import load_model, load_tokenizer


class FullPolicy(TrainedPolicy):
    """A model whose weights are its own, by their names in the model, those that are tied once.

    Args:
        base: Nobody else computes with its weights.
        name: Its folder or hub id, where its tokenizer is.
    """

    mark = "config.json"

    def __init__(
        self, base: PreTrainedModel, *, device: torch.device, name: str = "", checkpointing: bool = False
    ) -> None:
        base.requires_grad_(True)
        super().__init__(base, base, dict(base.named_parameters()), device=device, checkpointing=checkpointing)
        self._base, self._name = base, name
        for weight_name, weight in self._trained.items():
            if weight.dtype is not torch.float32:
                master = self._masters[weight_name] = nn.Parameter(weight.detach().float())
                weight.register_post_accumulate_grad_hook(partial(_add_gradient, master))

    def larger(self, weights: PolicyWeights) -> None:
        """The sampler gets the weights themselves: nothing scales them."""

    def write(self, folder: Path) -> None:
        """Write the model and its tokenizer in transformers' format."""
        self._base.save_pretrained(str(folder))
        load_tokenizer(self._name, where=self._name).save_pretrained(str(folder))

    def read(self, folder: Path) -> PolicyWeights:
        """The model of a folder, on the CPU."""
        disable_progress_bar()
        written = load_model(folder, self._base.dtype, where=str(folder))
        return {name: weight.detach() for name, weight in written.named_parameters()}


def _add_gradient(master: nn.Parameter, weight: torch.Tensor) -> None:
    assert weight.grad is not None
    gradient, weight.grad = weight.grad.float(), None
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
