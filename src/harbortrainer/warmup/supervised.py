"""Supervised fine-tuning on encoded demonstrations: AdamW on the cross-entropy of the answers' tokens.

A batch is computed in the learner's micro batches, so that memory grows with their tokens, not with the batch. As in
the learner, the optimizer steps float32 masters of weights of another dtype: bfloat16 rounds small updates away.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from renderers.base import Renderer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from harbortrainer.engines.attention.packed import enable_packing
from harbortrainer.engines.local.learner.micro_batch import MICRO_BATCH, MicroBatch, Packing, pack
from harbortrainer.engines.local.learner.output_head import OutputHead
from harbortrainer.engines.local.learner.trained_policy import (
    make_masters,
    recompute_activations,
    round_masters,
    token_logprobs,
)
from harbortrainer.engines.local.learner.training_sample import Sample, trained_tokens
from harbortrainer.engines.local.sampler.sampled_model import resolve_device, resolve_dtype
from harbortrainer.engines.models import load_model, load_tokenizer
from harbortrainer.engines.peft_internals import wrap_base
from harbortrainer.warmup.demonstrations import Demonstration
from harbortrainer.warmup.encoding import Encoded, encode, renderer_of


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
    device = resolve_device("auto")
    # Loaded in its dtype: a later cast would also round the frequencies of the rotary embedding.
    model = load_model(name, resolve_dtype("auto", device), where="warmup.model").to(device)
    return BasePolicy(model, tokenizer, renderer_of(tokenizer, renderer))


class SupervisedTrainer:
    """Supervised trainer of all weights, or of a LoRA of rank `lora_rank`."""

    def __init__(self, start: BasePolicy, *, lr: float, lora_rank: int = 0) -> None:
        self.model: PreTrainedModel | PeftModel = start.model.eval()  # without dropout, as the learner
        self._device = start.model.device
        if self._device.type != "cpu":
            recompute_activations(start.model)
        self._packing = Packing.SHARED if enable_packing(start.model) else Packing.ALONE
        self._head = OutputHead(start.model, self._device)
        if lora_rank:
            lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
            self.model = wrap_base(start.model, lora)
        self._tokenizer, self._lr = start.tokenizer, lr
        self._trained = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        self._masters = make_masters(self._trained)
        self._weights = list((self._trained | self._masters).values())
        self._optimizer = torch.optim.AdamW(self._weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)

    def step(self, episodes: Sequence[Encoded], *, scale: float) -> float:
        """Run one optimizer step at `scale` times the peak learning rate; return the loss in nats per token."""
        samples = [_sample(episode) for episode in episodes]
        tokens, loss = trained_tokens(samples), 0.0
        for micro_batch in self._micro_batches(samples):
            part = -self._logprobs(micro_batch).sum() / tokens
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = scale * self._lr
        self._optimizer.step()
        round_masters(self._masters, self._trained)
        self._optimizer.zero_grad()
        return loss

    @torch.no_grad()
    def likelihood(self, episodes: Sequence[Encoded]) -> list[float]:
        """Return the probability of exactly each episode's answers, sampled at temperature 1."""
        logprobs = torch.zeros(len(episodes), device=self._device)
        for micro_batch in self._micro_batches([_sample(episode) for episode in episodes]):
            logprobs.index_add_(0, micro_batch.tokens.sample, self._logprobs(micro_batch))
        return logprobs.exp().tolist()

    def save(self, folder: Path) -> None:
        """Write the weights, with a LoRA merged, and the tokenizer in transformers' format."""
        model = self.model
        if isinstance(model, PeftModel):
            model = copy.deepcopy(model).merge_and_unload()  # training may go on
        model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        return pack(samples, MICRO_BATCH[self._device.type], self._device, packing=self._packing)

    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Return the log-probability [N] of each token of an answer."""
        row: dict[str, object] = {"input_ids": batch.input_ids}
        if self._packing is not Packing.ALONE:
            row |= {"position_ids": batch.position_ids, "segments": batch.segments}
        states, tokens = self._head.states(**row)[batch.column], batch.tokens
        return token_logprobs(states, self._head.logits, tokens.token, tokens.temperature, vocab=self._head.vocab)[0]


def _sample(episode: Encoded) -> Sample:
    """Return a sequence as the learner packs it; its log-probabilities and versions are not used."""
    unused = [0] * len(episode.ids)
    return Sample(episode.ids, episode.answer, unused, unused, temperature=1.0, advantage=1.0)
