"""The policy in training: a causal language model of transformers, and its log-probabilities.

A subclass chooses the trained weights: a LoRA (`LoraPolicy`) or all weights (`FullPolicy`). The model stays in
evaluation mode during training, because dropout of the base would make it another policy than the one that sampled.

The optimizer steps float32 weights. If the model computes in fewer bits, these are master copies. The gradient of each
micro batch is added to them in float32, weight by weight during the backward pass. After a step the model's weights are
the rounded masters. A float32 model needs no copies.

Log-probabilities are computed in chunks, so that a large vocabulary does not fill the memory. One chunk of logits is
alive at a time; if there are several, each is recomputed in the backward pass. Logits are float32, divided by the
temperature.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GradientCheckpointingLayer, PreTrainedModel

from harbortrainer.engines.attention.packed import enable_packing
from harbortrainer.engines.local.learner.micro_batch import MicroBatch, Packing
from harbortrainer.engines.local.learner.output_head import OutputHead

CHUNK_ELEMENTS = 1 << 24
"""Logits alive at once (64 MB in float32)."""

type PolicyWeights = dict[str, Tensor]
"""Trained weights of one policy version by name, on the CPU, in the dtype of the model."""


class TrainedPolicy(ABC):
    """A model with trainable weights.

    Args:
        base: The model of transformers.
        model: The same model with its adapter, if it has one.
        trained: The trained weights, by the names under which they are saved.
        device: Device of the model.
        checkpointing: Recompute activations in the backward pass.
        dropouts: Dropout modules that are active in the training forward pass.
    """

    adapter_config: Mapping[str, object] | None = None
    """Content of peft's adapter_config.json; None for full fine-tuning."""
    marker_file: str
    """A file that `write` writes and that other subclasses do not write."""

    def __init__(
        self,
        base: PreTrainedModel,
        model: nn.Module,
        trained: dict[str, nn.Parameter],
        *,
        device: torch.device,
        checkpointing: bool,
        dropouts: Sequence[nn.Dropout] = (),
    ) -> None:
        self.model = model.to(device).eval()
        if checkpointing:
            recompute_activations(base)
        self.device = device
        self._trained, self._dropouts = trained, dropouts
        self._masters = make_masters(trained)
        """Float32 masters of the trained weights of other dtypes; the optimizer steps them instead."""
        self.packing = Packing.ALONE
        """Packing of samples that this model allows."""
        if enable_packing(base):
            # Each sample has its own dropout, so a common prefix cannot be shared.
            self.packing = Packing.APART if dropouts else Packing.SHARED
        self._head = OutputHead(base, device)

    @property
    def has_dropout(self) -> bool:
        """Whether the training forward pass has dropout, so that its log-probabilities are not the policy's."""
        return bool(self._dropouts)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Float32 parameters of the optimizer, in a fixed order."""
        return list((self._trained | self._masters).values())

    def weights(self) -> PolicyWeights:
        """Return a copy of the trained weights that the model computes with."""
        return {name: weight.detach().to("cpu", copy=True) for name, weight in self._trained.items()}

    @torch.no_grad()
    def set_weights(self, weights: PolicyWeights) -> None:
        """Replace the trained weights that the model computes with.

        Raises:
            ValueError: The names differ from this model's.
        """
        if weights.keys() != self._trained.keys():
            raise ValueError("the weights are another model's, or those of other target modules")
        for name, own in self._trained.items():
            own.copy_(weights[name])

    def load_masters(self) -> None:
        """Round the masters into the model's weights, after an optimizer step."""
        round_masters(self._masters, self._trained)

    def master_weights(self) -> PolicyWeights:
        """Return the float32 masters of weights of other dtypes; do not modify them."""
        return {name: master.detach() for name, master in self._masters.items()}

    @torch.no_grad()
    def restore(self, weights: PolicyWeights) -> None:
        """Restore weights and masters from the results of `weights` and `master_weights`; raises as `set_weights`."""
        self.set_weights(weights)
        for name, master in self._masters.items():
            master.copy_(weights[name])

    @abstractmethod
    def scaled_up(self, weights: PolicyWeights) -> PolicyWeights | None:
        """Return a scaled version, to detect a wrongly scaled adapter; None for full fine-tuning."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the current version in a standard format into an existing or new folder."""

    @abstractmethod
    def read(self, folder: Path) -> PolicyWeights:
        """Return the weights that `write` wrote. Raises OSError, SafetensorError or UserError if that fails."""

    def logprobs(self, batch: MicroBatch, *, training: bool) -> tuple[Tensor, Tensor]:
        """Return log-probability [N] (with gradient if training) and entropy [N] of the batch's tokens, in nats."""
        for dropout in self._dropouts:
            dropout.train(training)
        tokens, head = batch.tokens, self._head
        row: dict[str, object] = {"input_ids": batch.input_ids}
        if self.packing is not Packing.ALONE:
            row |= {"position_ids": batch.position_ids, "segments": batch.segments}
        with torch.set_grad_enabled(training):
            states = head.states(**row)[batch.column]
            return token_logprobs(states, head.logits, tokens.token, tokens.temperature, vocab=head.vocab)


def make_masters(trained: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return float32 masters of the weights of other dtypes; their gradients go to the masters."""
    masters: dict[str, nn.Parameter] = {}
    for name, weight in trained.items():
        if weight.dtype is not torch.float32:
            masters[name] = nn.Parameter(weight.detach().float())
            weight.register_post_accumulate_grad_hook(partial(_add_gradient, masters[name]))
    return masters


@torch.no_grad()
def round_masters(masters: Mapping[str, nn.Parameter], trained: Mapping[str, nn.Parameter]) -> None:
    """Round the masters into the weights of the same names."""
    for name, master in masters.items():
        trained[name].copy_(master)


def _add_gradient(master: nn.Parameter, weight: Tensor) -> None:
    assert weight.grad is not None
    gradient, weight.grad = weight.grad.float(), None
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)


def recompute_activations(base: PreTrainedModel) -> None:
    """Keep only the input of each block, and recompute the block in the backward pass."""
    if not base.supports_gradient_checkpointing:
        return
    base.activation_checkpointing_enable()
    for module in base.modules():
        # Only the block is set to training mode: the layers in it have dropout.
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def token_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: Tensor,
    *,
    vocab: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target, and the entropy of its distribution.

    Args:
        hidden: [N, D] the states that predict the targets.
        head: [n, D] -> [n, V] logits.
        targets: [N] token ids.
        temperature: [N] above 0.
        vocab: V.
        chunk_elements: Maximum logits in memory at once.

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
        # A logit of -inf has probability 0; without the clamp 0 * -inf would be NaN.
        entropy = -(plain.exp() * plain.clamp_min(torch.finfo(plain.dtype).min)).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy
