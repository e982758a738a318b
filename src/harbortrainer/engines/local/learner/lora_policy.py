"""A LoRA that peft adds to a model, trained alone.

The base stays frozen in its own dtype, in which the LoRA is computed too, as vLLM does. Only the LoRA's own dropout is
switched on, for the training forward.
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
from harbortrainer.engines.peft_internals import adapter_weights, inject_for_training
from harbortrainer.engines.pretrained import empty_model
from harbortrainer.errors import UserError

ADAPTER_FILE = "adapter_model.safetensors"
LARGER = 1.2
"""The adapter beside which one that is scaled shows."""


class LoraPolicy(TrainedPolicy):
    """A frozen base with one trainable adapter, whose weights go by peft's saved names
    (`base_model.model....lora_A.weight`)."""

    mark = "adapter_config.json"

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

    def larger(self, weights: PolicyWeights) -> PolicyWeights:
        """The adapter times `LARGER`."""
        return {name: weight * LARGER if "lora_B" in name else weight for name, weight in weights.items()}

    def write(self, folder: Path) -> None:
        """Write the adapter in peft's plain format."""
        self._wrapped.save_pretrained(str(folder), save_embedding_layers=False)

    def read(self, folder: Path) -> PolicyWeights:
        """The adapter of a folder."""
        return load_file(folder / ADAPTER_FILE)


def lora_config(base: PreTrainedModel, lora: LoraSettings, name: str) -> LoraConfig:
    """The adapter's config as peft has it; raises as `target_modules`."""
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        # peft and vLLM want a whole number where there is one; peft divides any other by the rank just as well.
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # ty: ignore[invalid-argument-type]
        lora_dropout=lora.dropout,
        target_modules=target_modules(base, lora.target_modules),
        base_model_name_or_path=name,
    )


def adapted_layers(model: str, lora: LoraSettings) -> list[str]:
    """What the layers are called that an adapter of this model has, the last part of their paths. From its config.

    Raises:
        UserError: As `pretrained.load_model` and `target_modules`.
    """
    base = empty_model(model, torch.float32, where="model.name", attention=lambda _: "eager")
    return sorted({name.rpartition(".")[2] for name in target_modules(base, lora.target_modules)})


def target_modules(base: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The linear layers to adapt, found as Prime-RL finds them (src/prime_rl/trainer/lora.py, 559b44772).

    A plain name matches any part of a layer's path, a pattern with special characters is searched in the path.
    Answers with last names (`q_proj`) when they describe the layers completely, with full paths otherwise.

    Raises:
        UserError: No linear layer matches.
    """
    patterns = list(patterns)
    linear = {name: name.rsplit(".", 1)[-1] for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    chosen = {name for name in linear if any(_matches(name, p) for p in patterns)}
    if not chosen:
        raise UserError(
            "no linear layer of the model has such a name",
            where="trainer.model.lora.target_modules",
            do=f"name some of {', '.join(sorted(set(linear.values())))}",
        )
    last_names = {linear[name] for name in chosen}
    described = {name for name, last in linear.items() if last in last_names}
    return sorted(last_names if described == chosen else chosen)


def _matches(name: str, pattern: str) -> bool:
    if re.search(r"[.*+?^$\[\]{}|()\\]", pattern):
        return re.search(pattern, name) is not None
    return pattern in name.split(".")
