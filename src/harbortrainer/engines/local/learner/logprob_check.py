"""Check of every sample: the recomputed log-probabilities must match the engine's recorded ones.

Each step computes the log-probability of every trained token again, under the policy version that sampled it. Tokens
and log-probabilities that do not belong together stop the run: a shifted list, another adapter, another temperature,
text that was tokenized again.

With d [n] the absolute differences of a sample's n trained tokens, in nats, a sample fails if

    max(d) > tolerance.worst     or     sum(d) > n * tolerance.mean + tolerance.worst

float32 agrees to about 1e-5. bfloat16 differs by about 0.01 in the mean, and by more on single tokens. The second rule
tolerates that: a single outlier does not stop a run, a sample that is off everywhere does. `logprob_audit.py` tests all
tokens of a step together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harbortrainer.engines.local.learner.loss import mismatch_kl
from harbortrainer.engines.local.learner.micro_batch import TrainedTokens
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.errors import ProofError


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest accepted difference of two computations of one log-probability, in nats."""

    mean: float
    """Over the trained tokens of one sample."""

    worst: float
    """For any one token."""


TOLERANCES = {
    torch.float32: Tolerance(mean=1e-4, worst=1e-3),
    torch.bfloat16: Tolerance(mean=0.1, worst=2.0),
    torch.float16: Tolerance(mean=0.05, worst=1.0),
}


@dataclass(frozen=True, slots=True)
class Recomputed:
    """All trained tokens of a step, recomputed under the versions that sampled them; tensors [N]."""

    tokens: TrainedTokens
    logprobs: Tensor
    """Log-probabilities, in nats."""
    entropy: Tensor
    """Entropies of the distributions that the tokens were drawn from, in nats."""


def check_logprobs(samples: Sequence[Sample], recomputed: Recomputed, tolerance: Tolerance) -> dict[str, float]:
    """Compare every recomputed log-probability with the recorded one.

    Returns:
        proof/logprob_diff/max and /mean (nats), and proof/mismatch_kl/mean.

    Raises:
        ProofError: A sample is out of tolerance. The message names the sample with the worst token.
    """
    log_ratio = recomputed.logprobs - recomputed.tokens.sampled_logprob
    difference = log_ratio.abs()
    if _out_of_tolerance(difference, recomputed.tokens.sample, len(samples), tolerance):
        raise ProofError(_error_message(samples, recomputed, difference, tolerance))
    return {
        "proof/logprob_diff/max": difference.max().item(),
        "proof/logprob_diff/mean": difference.mean().item(),
        "proof/mismatch_kl/mean": mismatch_kl(log_ratio).mean().item(),
    }


def _out_of_tolerance(difference: Tensor, owner: Tensor, count: int, tolerance: Tolerance) -> bool:
    total = torch.zeros(count, device=difference.device).index_add_(0, owner, difference)
    n = torch.bincount(owner, minlength=count)
    # Written so that a difference of NaN fails too.
    fine = (difference <= tolerance.worst).all() and (total <= n * tolerance.mean + tolerance.worst).all()
    return not bool(fine)


def _error_message(samples: Sequence[Sample], recomputed: Recomputed, difference: Tensor, tolerance: Tolerance) -> str:
    worst = int(difference.nan_to_num(nan=torch.inf).argmax())
    tokens = recomputed.tokens
    index, position = int(tokens.sample[worst]), int(tokens.position[worst])
    sample, own = samples[index], tokens.sample == index
    return (
        f"{sample.where}: token {position} (id {sample.token_ids[position]}) was sampled under policy version "
        f"{sample.versions[position]} with log-probability {sample.logprobs[position]:.4f}, but that version gives "
        f"{recomputed.logprobs[worst]:.4f}. The mean difference in this sample is {difference[own].mean():.2g} "
        f"(allowed: {tolerance.mean:g}, and {tolerance.worst:g} for one token). "
        f"{_likely_cause(sample, recomputed.logprobs[own])}"
    )


def _likely_cause(sample: Sample, recomputed: Tensor) -> str:
    """Return the likely cause in words; tests whether the list is shifted by one."""
    recorded = torch.tensor([lp for lp, m in zip(sample.logprobs, sample.mask, strict=True) if m])
    recomputed = recomputed.detach().cpu()
    if len(recorded) > 2 and len(recorded) == len(recomputed):
        for shift in (1, -1):
            if (recorded.roll(shift) - recomputed)[1:-1].abs().max() < 0.01:
                return "The log-probabilities belong to the neighbouring tokens: the lists are shifted by one."
    return (
        "Likely causes: the engine sampled with another adapter or model than it reports. Or it used a temperature "
        f"other than {sample.temperature:g}, top_p, top_k or a penalty. Or the trained tokens are not those it sampled."
    )
