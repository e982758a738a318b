"""The model that learns: any causal language model that transformers loads, with a LoRA that peft adds.

The base stays frozen in its own dtype; the LoRA is float32 always (its master copy and its arithmetic). The
model is in evaluation mode for good, also while it learns: dropout of the base would make the policy that
is trained another one than the policy that sampled. Only the LoRA's own dropout is switched on, for the
training forward.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from harbortrainer.engines.local.learner.batch import MicroBatch
from harbortrainer.engines.local.learner.head import token_logprobs
from harbortrainer.engines.local.learner.settings import LoraSettings
from harbortrainer.engines.local.learner.targets import target_modules
from harbortrainer.errors import UserError

Adapter = dict[str, Tensor]
"""LoRA weights by peft's saved names (`base_model.model....lora_A.weight`), float32 on the CPU."""


class Policy:
    """A frozen base with one trainable adapter, and the log-probabilities it gives to tokens."""

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
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # peft asks transformers by a name that is on its way out.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
            torch.manual_seed(seed)
            self.model: PeftModel = get_peft_model(base, _config(base, lora, name))
        self.model.to(device).eval()
        if checkpointing:
            _recompute_activations(base)
        self.device = device
        self._parameters = {
            name.replace(".default.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self._dropouts = [
            module
            for name, module in self.model.named_modules()
            if "lora_dropout" in name and isinstance(module, nn.Dropout)
        ]
        self._head = _Head(base, device)

    @property
    def has_dropout(self) -> bool:
        """Whether a training forward gives other log-probabilities than the policy has."""
        return bool(self._dropouts)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, in a fixed order."""
        return list(self._parameters.values())

    def adapter(self) -> Adapter:
        """A copy of the current LoRA weights."""
        return {name: p.detach().to("cpu", torch.float32, copy=True) for name, p in self._parameters.items()}

    @torch.no_grad()
    def set_adapter(self, adapter: Adapter) -> None:
        """Put other LoRA weights in place, exactly.

        Raises:
            ValueError: The names are not this model's.
        """
        if adapter.keys() != self._parameters.keys():
            raise ValueError("the adapter was made for another model or other target modules")
        for name, parameter in self._parameters.items():
            parameter.copy_(adapter[name])

    def logprobs(self, batch: MicroBatch, *, training: bool) -> tuple[Tensor, Tensor]:
        """Log-probability [N] (with gradient when training) and entropy [N] of the tokens the batch asks
        for."""
        for dropout in self._dropouts:
            dropout.train(training)
        tokens = batch.tokens
        with torch.set_grad_enabled(training):
            return token_logprobs(
                self._head.states(batch),
                self._head.logits,
                tokens.token,
                tokens.temperature,
                vocab=self._head.vocab,
            )


def _config(base: PreTrainedModel, lora: LoraSettings, name: str) -> LoraConfig:
    # peft and vLLM want a whole number where there is one.
    alpha: Any = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=target_modules(base, lora.target_modules),
        base_model_name_or_path=name,
    )


def _recompute_activations(base: PreTrainedModel) -> None:
    """Keep a block's input only, and compute the block again in the backward pass."""
    if not base.supports_gradient_checkpointing:
        return
    base.activation_checkpointing_enable()
    for module in base.modules():
        # The block itself must think that it trains; the layers in it, with their dropout, must not.
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


class _Head:
    """The last step of the model: hidden states at chosen positions, then logits of those alone.

    Some models do more after the last layer than one matrix (a cap, a scale). A model whose own logits are not
    what its decoder and its output matrix give is asked for its full logits instead: slower, and right.
    """

    def __init__(self, base: PreTrainedModel, device: torch.device) -> None:
        self._base: nn.Module = base
        self._decoder: nn.Module = base.get_decoder()
        self._output: nn.Module | None = base.get_output_embeddings()
        self.vocab = base.config.get_text_config().vocab_size
        if self._decoder is base or not self._agrees(device):
            self._output = None

    @torch.no_grad()
    def _agrees(self, device: torch.device) -> bool:
        if self._output is None:
            return False
        probe = torch.arange(8, device=device)[None] % self.vocab
        whole = self._base(input_ids=probe, use_cache=False).logits
        parts = self._output(self._decoder(input_ids=probe, use_cache=False).last_hidden_state)
        return whole.shape == parts.shape and torch.allclose(whole, parts, atol=1e-4, rtol=1e-3)

    def states(self, batch: MicroBatch) -> Tensor:
        """[N, D] what predicts each asked token: hidden states, or logits when the model cannot be split."""
        if self._output is None:
            every = self._base(input_ids=batch.input_ids, use_cache=False).logits
        else:
            every = self._decoder(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        return every[batch.row, batch.column]

    def logits(self, states: Tensor) -> Tensor:
        """[n, D] -> [n, V]."""
        return states if self._output is None else self._output(states)


def load_base(model: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """The pretrained model, on the CPU.

    Raises:
        UserError: transformers cannot load it: no such folder or hub id, no config, no weights.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise UserError(
            f"the model cannot be loaded ({reason})",
            where=f"model.name = {str(model)!r}",
            do="name a Hugging Face model or a folder with config.json and weights",
        ) from error
