"""The model that learns: any causal language model that transformers loads, and the log-probabilities it gives.

Which of its weights are trained is the subclass's: a LoRA's (`LoraPolicy`), or all of them (`FullPolicy`). The model is
in evaluation mode for good, also while it learns: dropout of the base would make the policy that is trained another one
than the policy that sampled.

The optimizer steps float32 weights. Where the model computes in fewer bits these are a master copy beside those that it
computes with, and so are their gradients: each micro batch's is added in float32, weight by weight as the backward pass
gets to it, and after a step the model gets the masters rounded. Of a float32 model they are the model's own.

Log-probabilities are taken in chunks, so that a large vocabulary never fills the memory: one chunk of logits is alive
at a time, in both directions; when more than one is needed, each is computed again in the backward pass. The logits
are float32 whatever the model's dtype, divided by the temperature.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GradientCheckpointingLayer, PreTrainedModel

from harbortrainer.engines.local.learner.micro_batch import MicroBatch, Packing
from harbortrainer.engines.output_head import OutputHead
from harbortrainer.engines.packed_attention import packs_rows

CHUNK_ELEMENTS = 1 << 24
"""Logits alive at once (64 MB in float32)."""

type PolicyWeights = dict[str, Tensor]
"""What one policy version is, by name, on the CPU, in the dtype that the model computes with."""


class TrainedPolicy(ABC):
    """A model of which some weights are trained, and the log-probabilities it gives to tokens.

    Args:
        base: As transformers knows it.
        model: The same, with what was put around it.
        trained: The weights that make one version another than the next, by the names under which they are saved.
        device: Where it goes.
        checkpointing: Compute activations again in the backward pass.
        dropouts: Switched on for the training forward.
    """

    adapter_config: Mapping[str, object] | None = None
    """What peft writes to adapter_config.json; None where every weight is trained."""
    mark: str
    """A file that `write` writes and that of another kind does not."""

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
        self._masters = with_masters(trained)
        """Of what is trained and is not float32 itself: what the optimizer steps in its place."""
        self.packing = Packing.ALONE
        """What may stand in one row of this model."""
        if packs_rows(base):
            # Each sample has its own dropout, also where samples begin alike.
            self.packing = Packing.APART if dropouts else Packing.SHARED
        self._head = OutputHead(base, device)

    @property
    def has_dropout(self) -> bool:
        """Whether a training forward gives other log-probabilities than the policy has."""
        return bool(self._dropouts)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps, float32, in a fixed order."""
        return list((self._trained | self._masters).values())

    def weights(self) -> PolicyWeights:
        """A copy of the weights that it computes with."""
        return {name: weight.detach().to("cpu", copy=True) for name, weight in self._trained.items()}

    @torch.no_grad()
    def set_weights(self, weights: PolicyWeights) -> None:
        """Compute with other weights, exactly.

        Raises:
            ValueError: The names are not this model's.
        """
        if weights.keys() != self._trained.keys():
            raise ValueError("the weights are another model's, or those of other target modules")
        for name, own in self._trained.items():
            own.copy_(weights[name])

    @torch.no_grad()
    def stepped(self) -> None:
        """The optimizer has made a step: compute with what it made."""
        for name, master in self._masters.items():
            self._trained[name].copy_(master)

    def masters(self) -> PolicyWeights:
        """What the optimizer goes on from, where that is not what the model computes with; not to be written to."""
        return {name: master.detach() for name, master in self._masters.items()}

    @torch.no_grad()
    def restore(self, weights: PolicyWeights) -> None:
        """Go on from these: what `masters` gave, and what `weights` gave of others; raises as `set_weights`."""
        self.set_weights(weights)
        for name, master in self._masters.items():
            master.copy_(weights[name])

    @abstractmethod
    def larger(self, weights: PolicyWeights) -> PolicyWeights | None:
        """A version whose change shows beside this one's if it is scaled; None where nothing scales it."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the current version, as others load it, into an existing or new folder."""

    @abstractmethod
    def read(self, folder: Path) -> PolicyWeights:
        """What `write` wrote. Raises OSError, SafetensorError or UserError when it cannot be read."""

    def logprobs(self, batch: MicroBatch, *, training: bool) -> tuple[Tensor, Tensor]:
        """Log-probability [N] (with gradient when training) and entropy [N] of the tokens the batch asks for."""
        for dropout in self._dropouts:
            dropout.train(training)
        tokens, head = batch.tokens, self._head
        row: dict[str, object] = {"input_ids": batch.input_ids}
        if self.packing is not Packing.ALONE:
            row |= {"position_ids": batch.position_ids, "stretches": batch.stretches}
        with torch.set_grad_enabled(training):
            states = head.states(**row)[batch.column]
            return token_logprobs(states, head.logits, tokens.token, tokens.temperature, vocab=head.vocab)


def with_masters(trained: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Float32 masters of those weights that are not float32 themselves; they get their gradients."""
    masters: dict[str, nn.Parameter] = {}
    for name, weight in trained.items():
        if weight.dtype is not torch.float32:
            masters[name] = nn.Parameter(weight.detach().float())
            weight.register_post_accumulate_grad_hook(partial(_add_gradient, masters[name]))
    return masters


def _add_gradient(master: nn.Parameter, weight: Tensor) -> None:
    assert weight.grad is not None
    gradient, weight.grad = weight.grad.float(), None
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)


def recompute_activations(base: PreTrainedModel) -> None:
    """Keep a block's input only, and compute the block again in the backward pass."""
    if not base.supports_gradient_checkpointing:
        return
    base.activation_checkpointing_enable()
    for module in base.modules():
        # The block itself must think that it trains; the layers in it, with their dropout, must not.
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
