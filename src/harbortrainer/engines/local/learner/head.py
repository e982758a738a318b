"""From hidden states to log-probabilities, in chunks, so that a large vocabulary never fills the memory.

One chunk of logits is alive at a time, in both directions: when more than one chunk is needed, each is
computed again in the backward pass. The logits are float32 whatever the model's dtype, divided by the
temperature.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 24
"""Logits alive at once (64 MB in float32)."""


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
    parts = [
        checkpoint(
            _chunk, hidden[i : i + rows], head, targets[i : i + rows], temperature[i : i + rows],
            use_reentrant=False,
        )
        for i in range(0, len(targets), rows)
    ]  # fmt: skip
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
