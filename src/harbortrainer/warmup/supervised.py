"""Supervised training on encoded demonstrations: AdamW on the cross-entropy of the answers' tokens."""

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from harbortrainer.warmup.encoding import Encoded, collate
from harbortrainer.warmup.starting_policy import StartingPolicy


class SupervisedTrainer:
    """A policy in supervised training: every weight of it, or a LoRA of rank `lora_rank`."""

    def __init__(self, start: StartingPolicy, *, lr: float, lora_rank: int = 0) -> None:
        self.model: PreTrainedModel | PeftModel = start.model
        if lora_rank:
            lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
            self.model = get_peft_model(start.model, lora)
        self._tokenizer, self._lr = start.tokenizer, lr
        self._weights = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)

    def step(self, episodes: Sequence[Encoded], *, scale: float) -> float:
        """One optimizer step at `scale` times the peak learning rate; returns the loss in nats a token."""
        ids, attention, labels = self._batch(episodes)
        self.model.train()
        loss = self.model(input_ids=ids, attention_mask=attention, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = scale * self._lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def likelihood(self, episodes: Sequence[Encoded]) -> list[float]:
        """Probability that the model, sampled at temperature 1, gives exactly the answers of each episode."""
        self.model.eval()
        chances: list[float] = []
        for start in range(0, len(episodes), 64):
            ids, attention, labels = self._batch(episodes[start : start + 64])
            logprobs = self.model(input_ids=ids, attention_mask=attention).logits[:, :-1].log_softmax(-1)
            chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
            chances += (chosen * (labels[:, 1:] != -100)).sum(1).exp().tolist()
        return chances

    def save(self, folder: Path) -> None:
        """Write weights, with a LoRA merged into them for good, and tokenizer in transformers' format."""
        if isinstance(self.model, PeftModel):
            self.model = self.model.merge_and_unload()
        self.model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    def _batch(self, episodes: Sequence[Encoded]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        device = next(self.model.parameters()).device
        ids, attention, labels = collate(episodes, pad=self._tokenizer.pad_token_id)
        return ids.to(device), attention.to(device), labels.to(device)
