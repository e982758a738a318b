"""The model that learns: any causal language model that transformers loads, with a LoRA that peft adds.

The base stays frozen in its own dtype; the LoRA is float32 always (its master copy and its arithmetic). The
model is in evaluation mode for good, also while it learns: dropout of the base would make the policy that
is trained another one than the policy that sampled. Only the LoRA's own dropout is switched on, for the
training forward.

Log-probabilities are taken in chunks, so that a large vocabulary never fills the memory: one chunk of logits is alive
at a time, in both directions; when more than one is needed, each is computed again in the backward pass. The logits
are float32 whatever the model's dtype, divided by the temperature.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GradientCheckpointingLayer, PreTrainedModel

from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.engines.local.learner.micro_batch import MicroBatch, Packing
from harbortrainer.engines.packed_attention import packs_rows
from harbortrainer.engines.peft_internals import adapter_weights, inject_for_training
from harbortrainer.errors import UserError

CHUNK_ELEMENTS = 1 << 24
"""Logits alive at once (64 MB in float32)."""

type AdapterWeights = dict[str, Tensor]
"""LoRA weights by peft's saved names (`base_model.model....lora_A.weight`), float32 on the CPU."""


class LoraPolicy:
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
        self.config = lora_config(base, lora, name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model, self._dropouts = inject_for_training(base, self.config)
        self.model.to(device).eval()
        if checkpointing:
            recompute_activations(base)
        self.device = device
        self._parameters = adapter_weights(self.model, "default")
        self.packing = Packing.ALONE
        """What may stand in one row of this model."""
        if packs_rows(base):
            # Each sample has its own dropout, also where samples begin alike.
            self.packing = Packing.APART if self._dropouts else Packing.SHARED
        self._head = _OutputHead(base, device)

    @property
    def has_dropout(self) -> bool:
        """Whether a training forward gives other log-probabilities than the policy has."""
        return bool(self._dropouts)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, in a fixed order."""
        return list(self._parameters.values())

    def adapter(self) -> AdapterWeights:
        """A copy of the current LoRA weights."""
        return {name: p.detach().to("cpu", torch.float32, copy=True) for name, p in self._parameters.items()}

    @torch.no_grad()
    def set_adapter(self, adapter: AdapterWeights) -> None:
        """Put other LoRA weights in place, exactly.

        Raises:
            ValueError: The names are not this model's.
        """
        if adapter.keys() != self._parameters.keys():
            raise ValueError("the adapter was made for another model or other target modules")
        for name, parameter in self._parameters.items():
            parameter.copy_(adapter[name])

    def write_adapter(self, folder: Path) -> None:
        """Write the current adapter in peft's plain format into an existing or new folder."""
        self.model.save_pretrained(str(folder), save_embedding_layers=False)

    def logprobs(self, batch: MicroBatch, *, training: bool) -> tuple[Tensor, Tensor]:
        """Log-probability [N] (with gradient when training) and entropy [N] of the tokens the batch asks for."""
        for dropout in self._dropouts:
            dropout.train(training)
        tokens, head = batch.tokens, self._head
        with torch.set_grad_enabled(training):
            states = head.states(batch, packed=self.packing is not Packing.ALONE)
            return token_logprobs(states, head.logits, tokens.token, tokens.temperature, vocab=head.vocab)


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


def recompute_activations(base: PreTrainedModel) -> None:
    """Keep a block's input only, and compute the block again in the backward pass."""
    if not base.supports_gradient_checkpointing:
        return
    base.activation_checkpointing_enable()
    for module in base.modules():
        # The block itself must think that it trains; the layers in it, with their dropout, must not.
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


class _OutputHead:
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

    def states(self, batch: MicroBatch, *, packed: bool) -> Tensor:
        """[N, D] what predicts each asked token: hidden states, or logits when the model cannot be split.

        Args:
            batch: One row; of one sequence unless `packed`.
            packed: Whether the model's attention knows rows of several sequences.
        """
        given: dict[str, object] = {"input_ids": batch.input_ids}
        if packed:
            given |= {"position_ids": batch.position_ids, "stretches": batch.stretches}
        if self._output is None:
            every = self._base(**given, use_cache=False).logits
        else:
            every = self._decoder(**given, use_cache=False).last_hidden_state
        return every[0, batch.column]

    def logits(self, states: Tensor) -> Tensor:
        """[n, D] -> [n, V]."""
        return states if self._output is None else self._output(states)


def token_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: Tensor,
    *,
    vocab: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """The log-probability of each target, and the entropy of the distribution it was drawn from.

    Args:
        hidden: [N, D] the states that predict the targets.
        head: [n, D] -> [n, V] logits.
        targets: [N] token ids.
        temperature: [N] above 0.
        vocab: V.
        chunk_elements: Logits in memory at once.

    Returns:
        logprobs [N] float32 with gradient, entropies [N] float32 without, both in nats.
    """
    rows = max(1, chunk_elements // vocab)
    if len(targets) <= rows:
        return _chunk(hidden, head, targets, temperature)
    chunks = zip(hidden.split(rows), targets.split(rows), temperature.split(rows), strict=True)
    parts = [checkpoint(_chunk, states, head, ids, heat, use_reentrant=False) for states, ids, heat in chunks]
    return torch.cat([p for p, _ in parts]), torch.cat([e for _, e in parts])


def _chunk(
    hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperature[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        plain = logprobs.detach()
        # A logit of -inf has probability 0 and adds nothing; 0 * -inf would be NaN.
        entropy = -(plain.exp() * plain.clamp_min(torch.finfo(plain.dtype).min)).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy
