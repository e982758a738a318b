"""Prime-RL's policy losses as plain functions of one token.

A trained token has the probability p under the policy in training, with a gradient. It was sampled with the probability
q, a constant. With the importance ratio r = p / q and the advantage A, already multiplied by adv_tau:

    default   -[inside] * A * r + kl_tau * (log r)^2           inside: p - q <= dppo_mask_high where A > 0,
                                                               else p - q >= -dppo_mask_low
    ipo       -[inside] * A * min(r, max_importance_ratio) + kl_tau * (log r)^2          inside: |p - q| <= eps
    icepop    -[inside] * A * r                                inside: ratio_low <= r <= ratio_high
    ppo       -min(A * s, A * clip(s, ratio_low, ratio_high))  s = min(r, max_importance_ratio)
    cispo     -clip(r, ratio_low, ratio_high) * A * log p      the clipped ratio is a constant

The gradient flows through r, log r and log p. Where max_importance_ratio bounds r, the gradient is that of a ratio of
this value: max_importance_ratio * grad log p. A token outside of a trust region keeps its KL term.

Sources: Prime-RL at commit 559b44772 (`default_loss_fn` and `ipo_loss_fn`, which has no max_importance_ratio, in
src/prime_rl/trainer/rl/loss.py) and its newer releases. DPPO: arXiv:2602.04879. Squared log-ratio: arXiv:2602.02276.
IcePop: arXiv:2510.18855. PPO: arXiv:1707.06347. CISPO: arXiv:2506.13585. At that commit docs/algorithms.md has min(r,
delta) in the default loss; the code does not clamp, and neither does this module.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from harbortrainer.config.trainer_table import (
    CispoLoss,
    DefaultLoss,
    IcePopLoss,
    IpoLoss,
    LossSettings,
    PpoLoss,
)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the losses need of the tokens; all tensors have one shape."""

    logprobs: Tensor
    """log p in nats, with the gradient."""

    sampled_logprobs: Tensor
    """log q in nats, without a gradient."""

    advantages: Tensor
    """A, in units of reward."""

    @property
    def log_ratio(self) -> Tensor:
        """The logarithm of r, with the gradient."""
        return self.logprobs - self.sampled_logprobs

    @property
    def probability_change(self) -> Tensor:
        """The change p - q, without a gradient."""
        return self.logprobs.detach().exp() - self.sampled_logprobs.exp()


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The loss of each token with its gradient, and where it masks or clips; all of the tokens' shape."""

    values: Tensor
    flags: Mapping[str, Tensor]
    """Bool tensors by Prime-RL's metric name: `is_masked`, `is_masked_high`, `is_masked_low`, `is_clipped`,
    `ratio_capped`."""


def token_losses(tokens: LossInputs, settings: LossSettings) -> TokenLosses:
    """Return the loss of each token; the module's docstring has the formulas."""
    match settings:
        case DefaultLoss():
            return default_loss(tokens, settings)
        case IpoLoss():
            return ipo_loss(tokens, settings)
        case IcePopLoss():
            return icepop_loss(tokens, settings)
        case PpoLoss():
            return ppo_loss(tokens, settings)
        case CispoLoss():
            return cispo_loss(tokens, settings)
        case _:
            assert_never(settings)


def default_loss(tokens: LossInputs, settings: DefaultLoss) -> TokenLosses:
    """Return DPPO with KL. An advantage of 0 counts as negative, as in Prime-RL."""
    rises, change, log_ratio = tokens.advantages > 0, tokens.probability_change, tokens.log_ratio
    masked = torch.where(rises, change > settings.dppo_mask_high, change < -settings.dppo_mask_low)
    gain = ~masked * (settings.adv_tau * tokens.advantages) * log_ratio.exp()
    flags = {"is_masked": masked, "is_masked_high": masked & rises, "is_masked_low": masked & (tokens.advantages < 0)}
    return TokenLosses(settings.kl_tau * log_ratio.square() - gain, flags)


def ipo_loss(tokens: LossInputs, settings: IpoLoss) -> TokenLosses:
    """Return IPO: a symmetric trust region on the probability."""
    masked, log_ratio = tokens.probability_change.abs() > settings.eps, tokens.log_ratio
    ratio = _capped_ratio(torch.where(masked, 0.0, log_ratio), settings.max_importance_ratio)
    gain = ~masked * (settings.adv_tau * tokens.advantages) * ratio
    return TokenLosses(settings.kl_tau * log_ratio.square() - gain, {"is_masked": masked})


def icepop_loss(tokens: LossInputs, settings: IcePopLoss) -> TokenLosses:
    """Return IcePop: a trust region on the importance ratio."""
    log_ratio = tokens.log_ratio
    below, above = _outside(log_ratio, settings.ratio_low, settings.ratio_high)
    masked = below | above
    ratio = torch.where(masked, 0.0, log_ratio).exp()
    return TokenLosses(-(~masked * (settings.adv_tau * tokens.advantages) * ratio), {"is_masked": masked})


def ppo_loss(tokens: LossInputs, settings: PpoLoss) -> TokenLosses:
    """Return PPO's clipped surrogate. `is_clipped` is where the clip removes the gradient."""
    log_ratio, advantages = tokens.log_ratio, settings.adv_tau * tokens.advantages
    below, above = _outside(log_ratio, settings.ratio_low, settings.ratio_high)
    ratio = _capped_ratio(log_ratio, settings.max_importance_ratio)
    clipped = ratio.clamp(settings.ratio_low, settings.ratio_high)
    flags = {
        "is_clipped": torch.where(advantages > 0, above, below & (advantages < 0)),
        "ratio_capped": log_ratio.detach() > math.log(settings.max_importance_ratio),
    }
    return TokenLosses(-torch.minimum(advantages * ratio, advantages * clipped), flags)


def cispo_loss(tokens: LossInputs, settings: CispoLoss) -> TokenLosses:
    """Return CISPO: every token keeps its gradient, with a clipped weight."""
    log_ratio = tokens.log_ratio.detach()
    below, above = _outside(log_ratio, settings.ratio_low, settings.ratio_high)
    weight = log_ratio.exp().clamp(settings.ratio_low, settings.ratio_high)
    values = -(weight * (settings.adv_tau * tokens.advantages) * tokens.logprobs)
    return TokenLosses(values, {"is_clipped": below | above})


def _outside(log_ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return where r is below `low` and where it is above `high`, both excluded; a `low` of 0 has nothing below."""
    value = log_ratio.detach()
    return value < (math.log(low) if low else -math.inf), value > math.log(high)


def _capped_ratio(log_ratio: Tensor, most: float) -> Tensor:
    """Return min(r, most) with the gradient of a ratio of this value."""
    value = log_ratio.detach()
    return (value.clamp_max(math.log(most)) + (log_ratio - value)).exp()
