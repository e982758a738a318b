"""One line of metrics for a step, by Prime-RL's names where it has one.

Means with a name of Prime-RL's are means of what Prime-RL takes them over: entropy and mismatch KL over
tokens; the masked shares first within each sample, then over samples. `loss` is the whole batch's (Prime-RL
logs the mean over micro batches, `loss/mean`, which depends on the packing).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harbortrainer.engines.local.learner.batch import Tokens


@dataclass(frozen=True, slots=True)
class Seen:
    """What one micro batch showed about its N tokens; detached."""

    tokens: Tokens
    logprobs: Tensor
    entropy: Tensor
    mismatch_kl: Tensor
    masked: Tensor
    loss: Tensor


def token_metrics(seen: Sequence[Seen], samples: int, version: int) -> dict[str, float]:
    """Loss, entropy, mismatch KL, masked shares and staleness of one step.

    Args:
        seen: Every micro batch of the step; together at least one token.
        samples: How many samples the step has; `Tokens.sample` counts up to it.
        version: The policy version that was trained.
    """
    entropy = torch.cat([s.entropy for s in seen])
    kl = torch.cat([s.mismatch_kl for s in seen])
    masked = torch.cat([s.masked for s in seen])
    owner = torch.cat([s.tokens.sample for s in seen])
    up = torch.cat([s.tokens.advantage for s in seen]) > 0
    age = version - torch.cat([s.tokens.version for s in seen]).float()
    every = torch.ones_like(masked)
    tensors = {
        "loss": torch.stack([s.loss for s in seen]).sum(),
        "entropy/all/mean": entropy.mean(),
        "mismatch_kl/all/mean": kl.mean(),
        "mismatch_kl/all/max": kl.max(),
        "kl_ent_ratio/mean": kl.mean() / entropy.mean().clamp_min(1e-12),
        "masked_mismatch_kl/mean": _mean_of_samples(kl, masked, owner, samples),
        "unmasked_mismatch_kl/mean": _mean_of_samples(kl, ~masked, owner, samples),
        "is_masked/mean": _mean_of_samples(masked.float(), every, owner, samples),
        "is_masked_high/mean": _mean_of_samples((masked & up).float(), every, owner, samples),
        "is_masked_low/mean": _mean_of_samples((masked & ~up).float(), every, owner, samples),
        "staleness/mean": age.mean(),
        "staleness/max": age.max(),
    }
    return dict(zip(tensors, torch.stack([t.float() for t in tensors.values()]).tolist(), strict=True))


def _mean_of_samples(values: Tensor, where: Tensor, owner: Tensor, samples: int) -> Tensor:
    """Mean over the samples of the mean of `values` [N] at `where` [N]; 0 for a sample without such a
    token."""
    zeros = torch.zeros(samples, device=values.device)
    total = zeros.index_add(0, owner, values * where)
    count = zeros.index_add(0, owner, where.float())
    return (total / count.clamp_min(1)).mean()
