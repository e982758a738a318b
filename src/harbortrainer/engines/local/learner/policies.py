"""The two kinds of trained policies: full fine-tuning (`FullPolicy`) and a LoRA of peft (`LoraPolicy`).

A LoRA's base stays frozen. The LoRA is computed in the base's dtype, as in vLLM. Only the LoRA's own dropout is active,
in the training forward pass.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.engines.local.learner.trained_policy import PolicyWeights, TrainedPolicy
from harbortrainer.engines.models import build_meta_model, load_model, load_tokenizer
from harbortrainer.engines.peft_internals import adapter_weights, inject_for_training
from harbortrainer.errors import UserError


class FullPolicy(TrainedPolicy):
    """A model with all weights trained, by their names in the model; tied weights occur once.

    Args:
        base: The model; no other model shares its weights.
        device: Device of the model.
        name: Folder or hub id of its tokenizer.
        checkpointing: Recompute activations in the backward pass.
    """

    marker_file = "config.json"

    def __init__(
        self, base: PreTrainedModel, *, device: torch.device, name: str = "", checkpointing: bool = False
    ) -> None:
        base.requires_grad_(True)
        super().__init__(base, base, dict(base.named_parameters()), device=device, checkpointing=checkpointing)
        self._base, self._name = base, name

    def scaled_up(self, weights: PolicyWeights) -> None:
        """Return None: the sampler loads the weights themselves, so nothing can scale them."""

    def write(self, folder: Path) -> None:
        """Write the model and its tokenizer in transformers' format."""
        self._base.save_pretrained(str(folder))
        load_tokenizer(self._name, where=self._name).save_pretrained(str(folder))

    def read(self, folder: Path) -> PolicyWeights:
        """Return the weights of the model in a folder, on the CPU."""
        written = load_model(folder, self._base.dtype, where=str(folder))
        return {name: weight.detach() for name, weight in written.named_parameters()}


ADAPTER_FILE = "adapter_model.safetensors"
SCALE_UP = 1.2
"""Factor of the scaled adapter that detects a wrongly scaled one."""


class LoraPolicy(TrainedPolicy):
    """A frozen base with one trainable adapter.

    The weights have the names under which peft saves them (`base_model.model....lora_A.weight`).
    """

    marker_file = "adapter_config.json"

    def __init__(
        self,
        base: PreTrainedModel,
        lora: LoraSettings,
        *,
        device: torch.device,
        seed: int,
        name: str = "",
        checkpointing: bool = False,
    ) -> None:
        config = lora_config(base, lora, name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._wrapped, dropouts = inject_for_training(base, config)
        trained = adapter_weights(self._wrapped, "default")
        super().__init__(base, self._wrapped, trained, device=device, checkpointing=checkpointing, dropouts=dropouts)
        self.adapter_config = config.to_dict()

    def scaled_up(self, weights: PolicyWeights) -> PolicyWeights:
        """Return the adapter times `SCALE_UP`."""
        return {name: weight * SCALE_UP if "lora_B" in name else weight for name, weight in weights.items()}

    def write(self, folder: Path) -> None:
        """Write the adapter in peft's plain format."""
        self._wrapped.save_pretrained(str(folder), save_embedding_layers=False)

    def read(self, folder: Path) -> PolicyWeights:
        """Return the adapter in a folder."""
        return load_file(folder / ADAPTER_FILE)


def lora_config(base: PreTrainedModel, lora: LoraSettings, name: str) -> LoraConfig:
    """Return peft's config of the adapter; raises as `target_modules`."""
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        # peft and vLLM expect an integer if possible; peft also accepts a float.
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # ty: ignore[invalid-argument-type]
        lora_dropout=lora.dropout,
        target_modules=target_modules(base, lora.target_modules),
        base_model_name_or_path=name,
    )


def adapted_layers(model: str, lora: LoraSettings) -> list[str]:
    """Return the last path parts of the layers that an adapter of this model has, from the model's config.

    Raises:
        UserError: As `pretrained.load_model` and `target_modules`.
    """
    base = build_meta_model(model, torch.float32, attention=lambda _: "eager")
    return sorted({name.rpartition(".")[2] for name in target_modules(base, lora.target_modules)})


def target_modules(base: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the linear layers to adapt, selected as in Prime-RL (src/prime_rl/trainer/lora.py, 559b44772).

    A plain name matches any part of a layer's path; a pattern with special characters is searched in the path. The
    result has last path parts (`q_proj`) if they describe the layers completely, otherwise full paths.

    Raises:
        UserError: No linear layer matches.
    """
    patterns = list(patterns)
    linear = {name: name.rsplit(".", 1)[-1] for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    chosen = {name for name in linear if any(_matches(name, p) for p in patterns)}
    if not chosen:
        raise UserError(
            "no linear layer of the model matches",
            where="trainer.model.lora.target_modules",
            do=f"use some of {', '.join(sorted(set(linear.values())))}",
        )
    last_names = {linear[name] for name in chosen}
    described = {name for name, last in linear.items() if last in last_names}
    return sorted(last_names if described == chosen else chosen)


def _matches(name: str, pattern: str) -> bool:
    if re.search(r"[.*+?^$\[\]{}|()\\]", pattern):
        return re.search(pattern, name) is not None
    return pattern in name.split(".")
