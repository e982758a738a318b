"""Every weight of a model, trained."""

from pathlib import Path

import torch
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
