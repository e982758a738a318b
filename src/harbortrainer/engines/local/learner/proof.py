"""The proof that what trains is what was sampled.

Each step, the log-probability of every trained token is computed again under the policy version that
sampled it and compared with the one that the engine reported. Tokens and log-probabilities that do not
belong together (a shifted list, another adapter, another temperature, text that was tokenized again) stop
the run.

A trial is refused when, with d the absolute differences of its n trained tokens,

    max(d) > tolerance.worst     or     sum(d) > n * tolerance.mean + tolerance.worst

float32 agrees to about 1e-5. bfloat16 differs by about 0.01 in the mean and by more on single tokens, which
the second rule forgives: one odd token does not stop a run, a trial that is off everywhere does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from harbortrainer.engines.local.learner.batch import Tokens
from harbortrainer.engines.local.learner.loss import mismatch_kl
from harbortrainer.engines.local.learner.sample import Sample


class ProofError(RuntimeError):
    """Tokens and log-probabilities do not belong together: training on them would be training on noise."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two computations of one log-probability may lie apart, in nats."""

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
    """Tokens and the log-probability [N] of each under the version that sampled it."""

    tokens: Tokens
    logprobs: Tensor


def prove(samples: Sequence[Sample], parts: Sequence[Recomputed], tolerance: Tolerance) -> dict[str, float]:
    """Compare every recomputed token with what the engine said.

    Returns:
        proof/logprob_diff/max and /mean (nats), and proof/mismatch_kl/mean.

    Raises:
        ProofError: A sample is out of tolerance; names the worst of them and its worst token.
    """
    recorded = torch.cat([p.tokens.sampled_logprob for p in parts])
    recomputed = torch.cat([p.logprobs for p in parts])
    owner = torch.cat([p.tokens.sample for p in parts])
    difference = (recomputed - recorded).abs()
    if _out_of_tolerance(difference, owner, len(samples), tolerance):
        raise ProofError(_explain(samples, parts, difference, tolerance))
    return {
        "proof/logprob_diff/max": difference.max().item(),
        "proof/logprob_diff/mean": difference.mean().item(),
        "proof/mismatch_kl/mean": mismatch_kl(recomputed - recorded).mean().item(),
    }


def _out_of_tolerance(difference: Tensor, owner: Tensor, count: int, tolerance: Tolerance) -> bool:
    total = torch.zeros(count, device=difference.device).index_add_(0, owner, difference)
    n = torch.bincount(owner, minlength=count)
    # Written so that a difference that is not a number fails too.
    fine = (difference <= tolerance.worst).all() and (total <= n * tolerance.mean + tolerance.worst).all()
    return not bool(fine)


def _explain(samples: Sequence[Sample], parts: Sequence[Recomputed], difference: Tensor, tolerance: Tolerance) -> str:
    worst = int(difference.nan_to_num(nan=torch.inf).argmax())
    recomputed = torch.cat([p.logprobs for p in parts])
    index, position = (
        int(torch.cat([getattr(p.tokens, name) for p in parts])[worst]) for name in ("sample", "position")
    )
    sample = samples[index]
    own = torch.cat([p.tokens.sample for p in parts]) == index
    return (
        f"{sample.where}: token {position} (id {sample.token_ids[position]}) was sampled under policy "
        f"version {sample.versions[position]} with log-probability {sample.logprobs[position]:.4f}, but that "
        f"version gives {recomputed[worst]:.4f} (mean difference in this sample "
        f"{difference[own].mean():.2g}, allowed {tolerance.mean:g}; for one token {tolerance.worst:g}). "
        f"{_cause(sample, recomputed[own])}"
    )


def _cause(sample: Sample, recomputed: Tensor) -> str:
    """The likely cause, in words; looks whether the list is merely shifted by one."""
    recorded = torch.tensor([lp for lp, m in zip(sample.logprobs, sample.mask, strict=True) if m])
    ours = recomputed.detach().cpu()
    if len(recorded) > 2 and len(recorded) == len(ours):
        for shift in (1, -1):
            if (recorded.roll(shift) - ours)[1:-1].abs().max() < 0.01:
                return "The log-probabilities are those of the neighbouring token: the lists are shifted by one."
    return (
        "Likely causes: the engine sampled with another adapter or model than it says, with a temperature "
        f"other than {sample.temperature:g}, with top_p, top_k or a penalty, or the tokens were not taken "
        "over as sampled."
    )


class SampledTurn(Protocol):
    """One request as the engine's ledger keeps it."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...


def match_completions[C: SampledTurn](
    turns: Sequence[tuple[Sequence[int], Sequence[float]]], completions: Sequence[C], *, where: str = ""
) -> list[C]:
    """For each sampled turn of a trace, the completion of the engine's ledger that it is.

    The tokens must be equal, and the log-probabilities too (1e-6, what a journey through JSON may cost).
    Every completion serves one turn at most; completions that no turn uses are fine (a request whose answer
    was dropped).

    Args:
        turns: (token ids, log-probabilities) of each sampled node of the trace, in order.
        completions: What the engine sampled in this session, in order.
        where: Task and trial in words, for the message.

    Raises:
        ProofError: A turn was not sampled by this engine as it stands in the trace.
    """
    left = list(completions)
    matched = []
    for number, (token_ids, logprobs) in enumerate(turns):
        same = [c for c in left if list(c.token_ids) == list(token_ids)]
        found = next((c for c in same if _equal(c.logprobs, logprobs)), None)
        if found is None:
            what = "log-probabilities" if same else "tokens"
            raise ProofError(
                f"{where + ': ' if where else ''}the {what} of sampled turn {number} ({len(token_ids)} tokens) "
                f"are not what the engine sampled ({len(left)} completions of this trial are left)"
            )
        left = [c for c in left if c is not found]
        matched.append(found)
    return matched


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= 1e-6 for a, b in zip(one, other, strict=True))
