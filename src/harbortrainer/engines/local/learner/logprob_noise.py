"""Measured noise of log-probabilities: by how much rounding alone makes two computations of one token differ.

The sampler rescores some of its own samples. The difference of the two log-probabilities of a token measures the noise
of this model on this machine. `logprob_audit.py` compares the learner's differences with it.

Unit: a change of logits changes the log-probability of a token of probability p by about 1 - p times as much. So a
difference is divided by 1 - p + 0.01, which makes certain and uncertain tokens comparable:

    e = (log p' - log p) / (1 - p + 0.01)

A fault in the sampler's reports is part of this measurement too. Invariants:

- The measurement is clamped to bounds that follow from the dtype alone.
- The largest noise is at most `TAIL_FACTOR` times the `TAIL_QUANTILE` of the sizes.
- Sequences that crossed a weight update are used only where there are too few others: part of them may have been
  sampled with the newer adapter.

A few nearly certain tokens cause most of the noise, so the noise of some tokens does not predict the noise of others.
Most trained tokens were rescored themselves (`RescoredLogprobs`), which gives both numbers for the same tokens. State
without I/O; nats throughout.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from harbortrainer.engines.local.learner.micro_batch import TrainedTokens
from harbortrainer.engines.local.learner.training_sample import Sample, contexts_of

MAX_TOKENS = 4096
"""Tokens to keep, the newest."""
MIN_TOKENS = 100
"""Fewer tokens than this are no measurement."""
TAIL_QUANTILE, TAIL_FACTOR = 0.98, 3.0
"""The largest noise is at most `TAIL_FACTOR` times this quantile."""


class RescoredSequence(Protocol):
    """One conversation that the sampler has rescored; `sampler.rescoring.Rescored` documents the fields."""

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
    def recomputed(self) -> Sequence[float]: ...
    @property
    def crossed_update(self) -> bool: ...


class RescoredLogprobs:
    """The sampler's rescored log-probabilities, by policy version, temperature and context."""

    def __init__(self) -> None:
        self._logprobs: dict[tuple[int, float], dict[int, float]] = {}

    def add(self, rescored: Sequence[RescoredSequence]) -> None:
        """Add rescored sequences."""
        for sequence in rescored:
            contexts = contexts_of(sequence.token_ids)
            known = self._logprobs.setdefault((sequence.version, sequence.temperature), {})
            pairs = zip(sequence.positions, sequence.recomputed, strict=True)
            known.update((contexts[position], logprob) for position, logprob in pairs)

    def evict_before(self, version: int) -> None:
        """Remove older versions, which are not trained on any more."""
        self._logprobs = {key: known for key, known in self._logprobs.items() if key[0] >= version}

    def lookup(self, samples: Sequence[Sample], tokens: TrainedTokens) -> Tensor:
        """Return the rescored log-probability of each trained token, [N] float64; NaN where it was not rescored."""
        contexts = [contexts_of(sample.token_ids) for sample in samples]
        where = zip(tokens.sample.tolist(), tokens.position.tolist(), tokens.version.tolist(), strict=True)
        return torch.tensor([self._lookup(samples[i], v, contexts[i][t]) for i, t, v in where], dtype=torch.float64)

    def _lookup(self, sample: Sample, version: int, context: int) -> float:
        return self._logprobs.get((version, sample.temperature), {}).get(context, math.nan)


@dataclass(frozen=True, slots=True)
class NoiseBounds:
    """Bounds for the measurement, in units of e, and for differences relative to it."""

    min_rms: float
    max_rms: float
    min_tail: float
    max_tail: float
    max_spread: float
    """Most times the measured root mean square for trained tokens, if other tokens were measured. In half precision a
    few tokens cause most of it: 5.9 was observed without a fault."""
    min_rescored_rms: float
    """Least root mean square on the trained tokens themselves. A sampler may compute the same number twice while the
    learner rounds differently. In bfloat16 the rounding of a logit between 2 and 4 gives 0.005."""


NOISE_BOUNDS = {
    torch.float32: NoiseBounds(1e-5, 1e-4, 1e-4, 1e-3, 3.0, 1e-5),
    torch.bfloat16: NoiseBounds(1e-3, 0.1, 0.02, 0.25, 8.0, 5e-3),
    torch.float16: NoiseBounds(1e-4, 0.02, 0.002, 0.1, 8.0, 6e-4),
}


def error_scale(one: Tensor, other: Tensor) -> Tensor:
    """Return the divisor of a difference [N]: 1 - p + 0.01 of the smaller of two log-probabilities [N]."""
    return -torch.expm1(torch.minimum(one, other).clamp(max=0.0)) + 0.01


class NoiseEstimate:
    """The noise measured so far.

    Args:
        bounds: The bounds of the model's dtype.
    """

    def __init__(self, bounds: NoiseBounds) -> None:
        self._bounds = bounds
        self._errors: deque[float] = deque(maxlen=MAX_TOKENS)
        self._crossed_errors: deque[float] = deque(maxlen=MAX_TOKENS)
        """Errors of sequences that crossed a weight update."""
        self._rms, self._tail = bounds.max_rms, bounds.max_tail

    def measure(self, rescored: Sequence[RescoredSequence]) -> None:
        """Add rescored sequences to the measurement."""
        for sequence in rescored:
            recorded = torch.tensor(sequence.logprobs, dtype=torch.float64)
            recomputed = torch.tensor(sequence.recomputed, dtype=torch.float64)
            errors = self._crossed_errors if sequence.crossed_update else self._errors
            errors.extend(((recomputed - recorded) / error_scale(recomputed, recorded)).tolist())
        self._update()

    @property
    def bounds(self) -> NoiseBounds:
        """The bounds of the measurement."""
        return self._bounds

    def rms_of(self, error: Tensor) -> float:
        """Return the root mean square of these tokens' own e [n], within the bounds."""
        rms = error.square().mean().sqrt().item()
        return min(max(rms, self._bounds.min_rescored_rms), self._bounds.max_rms)

    @property
    def rms(self) -> float:
        """Root mean square of e, within the bounds; the upper bound without a measurement."""
        return self._rms

    @property
    def tail(self) -> float:
        """Largest |e| that counts as noise, within the bounds; the upper bound without a measurement."""
        return self._tail

    def _update(self) -> None:
        measured = self._errors if len(self._errors) >= MIN_TOKENS else [*self._errors, *self._crossed_errors]
        if len(measured) < MIN_TOKENS:
            return
        bounds, sizes = self._bounds, torch.tensor(measured, dtype=torch.float64).abs()
        tail = min(sizes.max().item(), TAIL_FACTOR * sizes.quantile(TAIL_QUANTILE).item())
        self._tail = min(max(tail, bounds.min_tail), bounds.max_tail)
        rms = sizes.clamp(max=self._tail).square().mean().sqrt().item()
        self._rms = min(max(rms, bounds.min_rms), bounds.max_rms)
