"""The loss of a step over micro batches, its gradient, and the token metrics.

With l the policy loss of a trainable token (`losses.py`) and w the token's weight (`Sample.loss_weight`):

    loss   = sum( w * l ) / N          N = sum( w )

Both sums are over the trainable tokens of the whole batch, all micro batches together, without tokens of advantage 0.
With loss_aggregation = "token" every w is 1, and N counts the tokens. ECHO adds the cross-entropy of the batch's M
prompt tokens to predict, each with its weight and at the sampling temperature:

    loss  += 1 / M * sum( -ce_weight * log p )

Source: Prime-RL at commit 559b44772, `ce_loss_fn` and `compute_loss` in src/prime_rl/trainer/rl/loss.py; weights other
than 1 are those of its newer releases. The reported mismatch KL is r - log r - 1.

Metrics with Prime-RL's names are Prime-RL's means. Entropy and mismatch KL are means over tokens. The shares of masked
and clipped tokens and `nll` are means within each sample, then over the samples with such tokens. `loss` is the loss of
the whole batch. Prime-RL logs `loss/mean`, the mean over micro batches, which depends on the packing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harbortrainer.config.trainer_table import LossSettings
from harbortrainer.engines.local.learner.losses import LossInputs, token_losses
from harbortrainer.engines.local.learner.micro_batch import MicroBatch, TrainedTokens
from harbortrainer.engines.local.learner.trained_policy import TrainedPolicy


@dataclass(frozen=True, slots=True)
class Scales:
    """Divisors of a step's sums, over all micro batches; above 0."""

    trained: float
    """N: summed weights of the sampled tokens with an advantage."""

    predicted: int
    """M: tokens to predict."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss with its gradient, and values per token, which are detached and have the input's shape."""

    loss: Tensor
    """[] the weighted sum over the trainable tokens, divided by `scale`."""

    mismatch_kl: Tensor
    """r - log r - 1, at least 0; meaningful at trainable tokens only."""

    flags: Mapping[str, Tensor]
    """Bool tensors of `TokenLosses.flags`; false at tokens that are not trainable."""


def policy_loss(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: LossSettings,
    *,
    scale: float,
    weights: Tensor | float = 1.0,
) -> PolicyLoss:
    """Return the loss of one micro batch; the module's docstring has the formula.

    Args:
        logprobs: [T] or [B, T] nats, the trainer's log-probability of each token at the temperature; has the gradient.
        sampled_logprobs: Same shape, nats, the sampler's log-probability of each token; without a gradient.
        advantages: Same shape, in units of reward, the advantage of each token.
        mask: Same shape, bool, true at trainable tokens; elsewhere the other tensors may hold any finite value.
        settings: The table `[trainer.loss]`.
        scale: N, the summed weights of the trainable tokens of the whole batch, above 0.
        weights: Same shape, or one for all tokens: the weight of each token.
    """
    tokens = LossInputs(torch.where(mask, logprobs, sampled_logprobs), sampled_logprobs, advantages)
    found = token_losses(tokens, settings)
    return PolicyLoss(
        loss=(mask * weights * found.values).sum() / scale,
        mismatch_kl=mismatch_kl(tokens.log_ratio.detach()),
        flags={name: mask & flag for name, flag in found.flags.items()},
    )


def cross_entropy(logprobs: Tensor, weights: Tensor, *, scale: int) -> Tensor:
    """Return ECHO's loss of the tokens to predict.

    Args:
        logprobs: [M] nats, the log-probability of each predicted token; has the gradient.
        weights: [M], the weight of each token, above 0, without a unit.
        scale: The number of predicted tokens of the whole batch, at least 1.
    """
    return -(weights * logprobs).sum() / scale


def mismatch_kl(log_ratio: Tensor) -> Tensor:
    """Return r - log r - 1 of each token, at least 0; exact also where r is close to 1."""
    return torch.expm1(log_ratio) - log_ratio


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """Results of one micro batch for its N sampled tokens; detached tensors [N]."""

    tokens: TrainedTokens
    logprobs: Tensor
    entropy: Tensor
    result: PolicyLoss
    """Its `loss` includes the predicted tokens."""

    predicted: TrainedTokens
    """The M prompt tokens to predict."""

    nll: Tensor
    """[M] minus their log-probabilities, in nats."""

    def of_version(self, version: int) -> tuple[TrainedTokens, Tensor, Tensor]:
        """Return the tokens that one policy version sampled, with log-probabilities and entropies."""
        chosen = self.tokens.version == version
        return self.tokens.where(chosen), self.logprobs[chosen], self.entropy[chosen]


def forward_backward(
    policy: TrainedPolicy, micro_batch: MicroBatch, settings: LossSettings, *, scales: Scales
) -> TrainedBatch:
    """Add the gradient of one micro batch to the policy's gradient, and return its results."""
    logprobs, entropy = policy.logprobs(micro_batch, training=True)
    given = micro_batch.tokens.ce_weight > 0
    tokens, predicted = micro_batch.tokens.where(~given), micro_batch.tokens.where(given)
    sampled_logprobs, predicted_logprobs = logprobs[~given], logprobs[given]
    trains = tokens.advantage != 0
    result = policy_loss(
        sampled_logprobs,
        tokens.sampled_logprob,
        tokens.advantage,
        trains,
        settings,
        scale=scales.trained,
        weights=tokens.loss_weight,
    )
    loss = result.loss + cross_entropy(predicted_logprobs, predicted.ce_weight, scale=scales.predicted)
    loss.backward()
    result = replace(result, loss=loss.detach())
    return TrainedBatch(
        tokens, sampled_logprobs.detach(), entropy[~given], result, predicted, -predicted_logprobs.detach()
    )


def token_metrics(trained: Sequence[TrainedBatch], samples: int, version: int) -> dict[str, float]:
    """Return loss, entropy, mismatch KL, masked or clipped shares and staleness of one step.

    Args:
        trained: All micro batches of the step, together with at least one sampled token.
        samples: Number of samples of the step; the limit of `TrainedTokens.sample`.
        version: The policy version that was trained.
    """
    entropy = torch.cat([b.entropy for b in trained])
    kl = torch.cat([b.result.mismatch_kl for b in trained])
    flags = {name: torch.cat([b.result.flags[name] for b in trained]) for name in trained[0].result.flags}
    tokens = TrainedTokens.joined([b.tokens for b in trained])
    owner, every, age = tokens.sample, tokens.advantage != 0, version - tokens.version.float()
    mean_kl = kl.sum() / every.sum().clamp_min(1)

    def shares(values: Tensor, where: Tensor) -> Tensor:
        return _mean_of_samples(values, where, every, owner, samples)

    tensors = {
        "loss": torch.stack([b.result.loss for b in trained]).sum(),
        "entropy/all/mean": entropy.mean(),
        "mismatch_kl/all/mean": mean_kl,
        "mismatch_kl/all/max": kl.max(),
        "kl_ent_ratio/mean": mean_kl / entropy.mean().clamp_min(1e-12),
        "staleness/mean": age.mean(),
        "staleness/max": age.max(),
    }
    tensors |= {f"{name}/mean": shares(flag.float(), every) for name, flag in flags.items()}
    if (masked := flags.get("is_masked")) is not None:
        tensors["masked_mismatch_kl/mean"] = shares(kl, masked)
        tensors["unmasked_mismatch_kl/mean"] = shares(kl, every & ~masked)
    nll = torch.cat([b.nll for b in trained])
    if len(nll):
        of = torch.cat([b.predicted.sample for b in trained])
        given = torch.ones_like(nll, dtype=torch.bool)
        tensors["nll/mean"] = _mean_of_samples(nll, given, given, of, samples)
    return dict(zip(tensors, torch.stack([t.float() for t in tensors.values()]).tolist(), strict=True))


def _mean_of_samples(values: Tensor, where: Tensor, among: Tensor, owner: Tensor, samples: int) -> Tensor:
    """Return a mean of means: of `values` [N] at `where` [N] within each sample, then over the counted samples.

    A sample counts if it has a token of `among` [N]. A mean over nothing is 0.
    """
    zeros = torch.zeros(samples, device=values.device)
    total = zeros.index_add(0, owner, values * where)
    count = zeros.index_add(0, owner, where.float())
    counted = zeros.index_add(0, owner, among.float()) > 0
    return (total / count.clamp_min(1))[counted].sum() / counted.sum().clamp_min(1)
