"""The proof that what trains is what was sampled.

Each step, the log-probability of every trained token is computed again under the policy version that
sampled it and compared with the one that the engine reported. Tokens and log-probabilities that do not
belong together (a shifted list, another adapter, another temperature, text that was tokenized again) stop
the run.

A trial is refused when, with d the absolute differences of its n trained tokens,

    max(d) > tolerance.worst     or     sum(d) > n * tolerance.mean + tolerance.worst

float32 agrees to about 1e-5. bfloat16 differs by about 0.01 in the mean and by more on single tokens, which
the second rule forgives: one odd token does not stop a run, a trial that is off everywhere does.

What rounding alone does to a log-probability on this machine is measured too (`Noise`, the yardstick of `evidence.py`):
the sampler scores some of its own samples again. A difference of logits reaches the log-probability of a token of
probability p times about 1 - p, so that differences are kept as multiples of it, which makes those of certain and of
uncertain tokens comparable:

    e = (log p' - log p) / (1 - p + 0.01).

A fault in what the sampler reports is in this measurement too. It is therefore believed only within bounds that
follow from the dtype alone, and its largest 2 % no further than three times what the others reach. What a request that
a hand-over overtook is off by is no measure where there are others: it may have gone on by the newer adapter.

A few tokens, the nearly certain ones, make most of the noise, so that the noise of some tokens says little of that of
others. Most trained tokens are among those that the sampler scored again (`SecondScores`): on them both are known.
State without I/O; nats throughout.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from harbortrainer.engines.local.learner.loss import mismatch_kl
from harbortrainer.engines.local.learner.micro_batch import TrainedTokens
from harbortrainer.engines.local.learner.training_sample import Sample, contexts_of
from harbortrainer.errors import ProofError

POOL = 4096
"""Tokens that are remembered, the newest."""
ENOUGH = 100
"""Fewer tokens than this are no measurement."""
MOST, BEYOND = 0.98, 3.0
"""The largest noise is at most `BEYOND` times what this share of the tokens stays under."""


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
    """All trained tokens of a step, and what the version that sampled each says of it, [N] each."""

    tokens: TrainedTokens
    logprobs: Tensor
    entropy: Tensor
    """Of the distribution that the token was drawn from."""


def prove(samples: Sequence[Sample], recomputed: Recomputed, tolerance: Tolerance) -> dict[str, float]:
    """Compare every recomputed token with what the engine said.

    Returns:
        proof/logprob_diff/max and /mean (nats), and proof/mismatch_kl/mean.

    Raises:
        ProofError: A sample is out of tolerance; names the worst of them and its worst token.
    """
    log_ratio = recomputed.logprobs - recomputed.tokens.sampled_logprob
    difference = log_ratio.abs()
    if _out_of_tolerance(difference, recomputed.tokens.sample, len(samples), tolerance):
        raise ProofError(_explain(samples, recomputed, difference, tolerance))
    return {
        "proof/logprob_diff/max": difference.max().item(),
        "proof/logprob_diff/mean": difference.mean().item(),
        "proof/mismatch_kl/mean": mismatch_kl(log_ratio).mean().item(),
    }


def _out_of_tolerance(difference: Tensor, owner: Tensor, count: int, tolerance: Tolerance) -> bool:
    total = torch.zeros(count, device=difference.device).index_add_(0, owner, difference)
    n = torch.bincount(owner, minlength=count)
    # Written so that a difference that is not a number fails too.
    fine = (difference <= tolerance.worst).all() and (total <= n * tolerance.mean + tolerance.worst).all()
    return not bool(fine)


def _explain(samples: Sequence[Sample], recomputed: Recomputed, difference: Tensor, tolerance: Tolerance) -> str:
    worst = int(difference.nan_to_num(nan=torch.inf).argmax())
    tokens = recomputed.tokens
    index, position = int(tokens.sample[worst]), int(tokens.position[worst])
    sample, own = samples[index], tokens.sample == index
    return (
        f"{sample.where}: token {position} (id {sample.token_ids[position]}) was sampled under policy "
        f"version {sample.versions[position]} with log-probability {sample.logprobs[position]:.4f}, but that "
        f"version gives {recomputed.logprobs[worst]:.4f} (mean difference in this sample "
        f"{difference[own].mean():.2g}, allowed {tolerance.mean:g}; for one token {tolerance.worst:g}). "
        f"{_cause(sample, recomputed.logprobs[own])}"
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


class Rescored(Protocol):
    """One conversation that the sampler has scored again; `sampler.rescoring.ScoredAgain` says what each is."""

    @property
    def version(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def positions(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def again(self) -> Sequence[float]: ...
    @property
    def overtaken(self) -> bool: ...


class SecondScores:
    """What the sampler's second scoring said, by all that it depends on: version, temperature and context."""

    def __init__(self) -> None:
        self._again: dict[tuple[int, float], dict[int, float]] = {}

    def add(self, rescored: Sequence[Rescored]) -> None:
        """Take in what was scored again."""
        for told in rescored:
            contexts = contexts_of(told.token_ids)
            known = self._again.setdefault((told.version, told.temperature), {})
            known.update((contexts[t], again) for t, again in zip(told.positions, told.again, strict=True))

    def forget_before(self, version: int) -> None:
        """Nothing trains any more that was sampled by an older version."""
        self._again = {key: known for key, known in self._again.items() if key[0] >= version}

    def of(self, samples: Sequence[Sample], tokens: TrainedTokens) -> Tensor:
        """[N] float64: each trained token's, NaN where it was not scored again."""
        contexts = [contexts_of(sample.token_ids) for sample in samples]
        where = zip(tokens.sample.tolist(), tokens.position.tolist(), tokens.version.tolist(), strict=True)
        return torch.tensor([self._of(samples[i], v, contexts[i][t]) for i, t, v in where], dtype=torch.float64)

    def _of(self, sample: Sample, version: int, context: int) -> float:
        return self._again.get((version, sample.temperature), {}).get(context, math.nan)


@dataclass(frozen=True, slots=True)
class NoiseBounds:
    """Between which figures a measurement is believed, in units of e, and how far it is trusted."""

    least_rms: float
    most_rms: float
    least_tail: float
    most_tail: float
    most_spread: float
    """Times the measured root mean square that the trained tokens' may be, where the measurement is of other tokens. In
    half precision few of them make most of it: 5.9 was seen without a fault."""
    least_again: float
    """Root mean square on the trained tokens themselves. A sampler may compute the same twice, bit for bit, and the
    learner another way: what that makes is a rounding of the logits, in bfloat16 0.005 for one between 2 and 4."""


NOISE_BOUNDS = {
    torch.float32: NoiseBounds(1e-5, 1e-4, 1e-4, 1e-3, 3.0, 1e-5),
    torch.bfloat16: NoiseBounds(1e-3, 0.1, 0.02, 0.25, 8.0, 5e-3),
    torch.float16: NoiseBounds(1e-4, 0.02, 0.002, 0.1, 8.0, 6e-4),
}


def share_left(one: Tensor, other: Tensor) -> Tensor:
    """1 - p + 0.01 of the smaller of two log-probabilities [N]: what divides a difference."""
    return -torch.expm1(torch.minimum(one, other).clamp(max=0.0)) + 0.01


class Noise:
    """What was measured up to now.

    Args:
        bounds: Of the model's dtype.
    """

    def __init__(self, bounds: NoiseBounds) -> None:
        self._bounds = bounds
        self._pool: deque[float] = deque(maxlen=POOL)
        self._overtaken: deque[float] = deque(maxlen=POOL)
        self._rms, self._tail = bounds.most_rms, bounds.most_tail

    def measure(self, rescored: Sequence[Rescored]) -> None:
        """Take in what the sampler scored again."""
        for completion in rescored:
            recorded = torch.tensor(completion.logprobs, dtype=torch.float64)
            again = torch.tensor(completion.again, dtype=torch.float64)
            pool = self._overtaken if completion.overtaken else self._pool
            pool.extend(((again - recorded) / share_left(again, recorded)).tolist())
        self._believe()

    @property
    def bounds(self) -> NoiseBounds:
        """Between which figures it is believed."""
        return self._bounds

    def of_tokens(self, error: Tensor) -> float:
        """Root mean square of these tokens' own e, within the bounds."""
        rms = error.square().mean().sqrt().item()
        return min(max(rms, self._bounds.least_again), self._bounds.most_rms)

    @property
    def rms(self) -> float:
        """Root of the mean square of e, within the bounds; the upper one while there is no measurement."""
        return self._rms

    @property
    def tail(self) -> float:
        """The largest |e| that is noise, within the bounds; the upper one while there is no measurement."""
        return self._tail

    def _believe(self) -> None:
        measured = self._pool if len(self._pool) >= ENOUGH else [*self._pool, *self._overtaken]
        if len(measured) < ENOUGH:
            return
        bounds, sizes = self._bounds, torch.tensor(measured, dtype=torch.float64).abs()
        tail = min(sizes.max().item(), BEYOND * sizes.quantile(MOST).item())
        self._tail = min(max(tail, bounds.least_tail), bounds.most_tail)
        rms = sizes.clamp(max=self._tail).square().mean().sqrt().item()
        self._rms = min(max(rms, bounds.least_rms), bounds.most_rms)
