"""Prime-RL's default loss, on tensors of any one shape.

For a trainable token with policy probability p (the trainer's, with gradient), sampling probability q (the
engine's, a constant), advantage A and importance ratio r = p / q:

    masked = p - q > dppo_mask_high     where A > 0   (its probability rose enough already)
             p - q < -dppo_mask_low     where A <= 0  (its probability fell enough already)
    loss   = 1 / N * sum( -[not masked] * adv_tau * A * r  +  kl_tau * (log r)^2 )

N is the number of trainable tokens of the whole batch, over all micro batches. The gradient flows through r
and through log r; a masked token keeps its KL term. The mismatch KL that is reported is r - log r - 1.

Source: Prime-RL at commit 559b44772, `default_loss_fn` and `compute_loss` in src/prime_rl/trainer/rl/loss.py
(trust region: arXiv:2602.04879; squared-log-ratio term: arXiv:2602.02276). docs/algorithms.md there also
writes min(r, delta); the code at that commit does not clamp, and the code is what is implemented here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from harbortrainer.engines.local.learner.settings import LossSettings


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What one call gives: the loss to differentiate, and what each token did (detached, the input's
    shape)."""

    loss: Tensor
    """[] the sum over the trainable tokens, divided by `scale`."""

    mismatch_kl: Tensor
    """r - log r - 1, at least 0; meaningful at trainable tokens only."""

    masked: Tensor
    """bool: trainable, and outside the trust region."""


def policy_loss(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: LossSettings,
    *,
    scale: int,
) -> TokenLoss:
    """The loss of one micro batch. See the module for the formula.

    Args:
        logprobs: [T] or [B, T], the trainer's log-probability of each token, temperature applied; has the
        gradient. sampled_logprobs: same shape, the engine's log-probability; no gradient. advantages: same
        shape. mask: same shape, bool, true at trainable tokens; elsewhere the other tensors may hold any
        finite value. settings: `[trainer.loss]`. scale: N, the trainable tokens of the whole batch, at
        least 1.
    """
    log_ratio = torch.where(mask, logprobs - sampled_logprobs, 0.0)
    ratio = log_ratio.exp()
    masked = mask & outside_trust_region(logprobs.detach(), sampled_logprobs, advantages, settings)
    gain = (mask & ~masked) * (settings.adv_tau * advantages) * ratio
    loss = (settings.kl_tau * log_ratio.square() - gain).sum() / scale
    return TokenLoss(loss=loss, mismatch_kl=mismatch_kl(log_ratio.detach()), masked=masked)


def mismatch_kl(log_ratio: Tensor) -> Tensor:
    """r - log r - 1 of each token, at least 0; written so that it is exact where r is close to 1."""
    return torch.expm1(log_ratio) - log_ratio


def outside_trust_region(
    logprobs: Tensor, sampled_logprobs: Tensor, advantages: Tensor, settings: LossSettings
) -> Tensor:
    """True where the probability already moved further than allowed in the direction the advantage pushes it.

    All tensors have one shape, which is also the result's. A zero advantage counts as negative, as in
    Prime-RL.
    """
    moved = logprobs.exp() - sampled_logprobs.exp()
    return torch.where(advantages > 0, moved > settings.dppo_mask_high, moved < -settings.dppo_mask_low)
