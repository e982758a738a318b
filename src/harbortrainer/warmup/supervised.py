"""Supervised fine-tuning on encoded demonstrations: AdamW on the cross-entropy of the answers' tokens."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from renderers.base import Renderer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from harbortrainer.engines.models import load_model, load_tokenizer
from harbortrainer.warmup.demonstrations import Demonstration
from harbortrainer.warmup.encoding import Encoded, collate, encode, renderer_of


@dataclass(frozen=True)
class BasePolicy:
    """A model with its tokenizer and renderer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer

    def encode(self, demonstration: Demonstration, system: str = "") -> list[Encoded]:
        """Encode one episode of an agent with this system prompt as sequences."""
        return encode(demonstration, self.renderer, self.tokenizer, system)


def load_policy(name: str, renderer: Mapping[str, object] | None = None) -> BasePolicy:
    """Load a model by hub id or folder, onto the GPU if there is one.

    Args:
        name: The hub id or folder.
        renderer: A run's table `[orchestrator.renderer]`.

    Raises:
        UserError: transformers cannot load it.
    """
    tokenizer = load_tokenizer(name, where="warmup.model")
    model = load_model(name, torch.float32, where="warmup.model")
    if torch.cuda.is_available():
        model = model.to(dtype=torch.bfloat16, device="cuda")
    return BasePolicy(model, tokenizer, renderer_of(tokenizer, renderer))


class SupervisedTrainer:
    """Supervised trainer of all weights, or of a LoRA of rank `lora_rank`."""

    def __init__(self, start: BasePolicy, *, lr: float, lora_rank: int = 0) -> None:
        self.model: PreTrainedModel | PeftModel = start.model
        if lora_rank:
            lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
            self.model = get_peft_model(start.model, lora)
        self._tokenizer, self._lr = start.tokenizer, lr
        self._weights = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)

    def step(self, episodes: Sequence[Encoded], *, scale: float) -> float:
        """Run one optimizer step at `scale` times the peak learning rate; return the loss in nats per token."""
        ids, attention, labels = self._batch(episodes)
        self.model.train()
        loss = nn.functional.cross_entropy(*self._answer_logits(ids, attention, labels))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = scale * self._lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def likelihood(self, episodes: Sequence[Encoded]) -> list[float]:
        """Return the probability of exactly each episode's answers, sampled at temperature 1."""
        self.model.eval()
        probabilities: list[float] = []
        for start in range(0, len(episodes), 64):
            ids, attention, labels = self._batch(episodes[start : start + 64])
            logprobs = self.model(input_ids=ids, attention_mask=attention).logits[:, :-1].log_softmax(-1)
            chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
            probabilities += (chosen * (labels[:, 1:] != -100)).sum(1).exp().tolist()
        return probabilities

    def save(self, folder: Path) -> None:
        """Write the weights, with a LoRA merged, and the tokenizer in transformers' format."""
        model = self.model
        if isinstance(model, PeftModel):
            model = copy.deepcopy(model).merge_and_unload()  # training may go on
        model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    def _answer_logits(
        self, ids: torch.Tensor, attention: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [n, V] and labels [n] of the answers' tokens; -100 for other tokens at the same places.

        Logits of whole prompts would take gigabytes with a real vocabulary.
        """
        places = (labels[:, 1:] != -100).any(0).nonzero()[:, 0]
        logits = self.model(input_ids=ids, attention_mask=attention, logits_to_keep=places).logits
        return logits.flatten(0, 1), labels[:, places + 1].flatten()

    def _batch(self, episodes: Sequence[Encoded]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        device = next(self.model.parameters()).device
        ids, attention, labels = collate(episodes, pad=self._tokenizer.pad_token_id)
        return ids.to(device), attention.to(device), labels.to(device)
