"""Audit of log-probabilities: statistical tests over all tokens of a step, and of the last steps.

For each token, e is the recomputed minus the recorded log-probability, over 1 - p + 0.01 (`logprob_noise.py`). Without
a fault e is noise and has no direction. The tests, by the names of their metrics:

- `spread`: the root mean square of e, divided by the root mean square of the measured noise. The rescored tokens are
  compared with their own noise; where they are few, all tokens are compared with the noise measured on others.
- `strays`: the number of outliers, whose |e| is far above the largest noise.
- A direction u: the effect of a certain fault on e. The slope b = sum(e u) / sum(u u) must be 0 within its standard
  error.

| direction                          | u times 1 - p + 0.01                                                        |
|------------------------------------|-----------------------------------------------------------------------------|
| `shift`                            | 1: a constant                                                               |
| `lean`                             | 1 - p + 0.01: a truncated distribution (top_k, top_p)                       |
| `temperature`                      | log p + H, the derivative of log p by the inverse temperature; b = 1 - 1/T  |
| `before`, `after`, `base`,`larger` | log p under the claimed version minus log p under an alternative; at b = 1  |
|                                    | the alternative sampled                                                     |

The alternatives are the version before, the version after, the base model, and the claimed adapter times 1.2.

Standard errors are White's (1980) with clusters. A cluster is a context with its token, because trials of one group
repeat each other. Each residual is divided by 1 - leverage, so that one heavy token decides nothing.

u and e share the
rounding of one forward pass, which alone makes b up to noise / sum(u u). That much is allowed, and for `shift` and
`lean` a systematic share of the noise. State without I/O.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from harbortrainer.engines.local.learner.logprob_noise import MIN_TOKENS, NoiseEstimate, error_scale

Z = 6.0
"""Standard errors beyond the allowed slope: 2e-9 per test under normal noise."""
WINDOW = 10
"""Steps that are tested together, besides each step alone."""
MAX_RESCORED_SPREAD = 2.0
"""Largest `spread` over rescored tokens: times the sampler's own difference on the same tokens."""
OUTLIER = 3.0
"""Times the largest noise, from which on a token is an outlier."""
SYSTEMATIC = 0.25
"""Share of the noise's root mean square that may be systematic."""
SLACK = 0.02
"""Slope that is always allowed along a version or the temperature."""

CAUSES = {
    "spread": "the sampler does not compute with the learner's weights (its base model, its precision, its adapter)",
    "strays": "some of the log-probabilities were changed, or their tokens were",
    "shift": "every log-probability is off by a constant",
    "lean": "the engine sampled from a truncated distribution (top_k, top_p, min_p), or with other weights",
    "temperature": "the engine sampled at another temperature than the run's, or with top_k, top_p or min_p",
    "before": "the version before the claimed one sampled these tokens",
    "after": "the version after the claimed one sampled these tokens",
    "base": "the sampler's weights were never updated (1), or are others than the learner's",
    "larger": "the sampler's adapter is scaled (0.25 is 1.05 times too large), or is another one than the learner's",
}


@dataclass(frozen=True, slots=True)
class ComparedTokens:
    """N tokens with both log-probabilities under the claimed version; float64 on the CPU, in nats."""

    recorded: Tensor
    recomputed: Tensor
    context: Tensor
    """[N] int64, equal for tokens that are equal and whose context is equal."""

    @property
    def scale(self) -> Tensor:
        """[N] the divisor 1 - p + 0.01."""
        return error_scale(self.recorded, self.recomputed)

    @property
    def error(self) -> Tensor:
        """[N] e of each token."""
        return (self.recomputed - self.recorded) / self.scale

    def where(self, chosen: Tensor) -> "ComparedTokens":
        """Return the tokens that a mask or indices select."""
        return ComparedTokens(self.recorded[chosen], self.recomputed[chosen], self.context[chosen])

    @classmethod
    def joined(cls, parts: Sequence["ComparedTokens"]) -> "ComparedTokens":
        """Concatenate the tokens of at least one part."""
        return cls(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)))


@dataclass(frozen=True, slots=True)
class Regression:
    """Sums of a regression of e on one direction u; the sums of several steps add up."""

    eu: float = 0.0
    uu: float = 0.0
    ee: float = 0.0
    cluster_variance: float = 0.0
    """Sum over the clusters of (sum of residual times u / (1 - leverage)) squared."""
    noise: float = 0.0
    """Most that the noise alone adds to `uu`."""

    def __add__(self, other: "Regression") -> "Regression":
        return Regression(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def slope(self) -> float:
        """b = sum(e u) / sum(u u); 0 without data."""
        return self.eu / self.uu if self.uu else 0.0

    @property
    def explained(self) -> float:
        """Share of sum(e e) that this direction explains."""
        return self.eu * self.slope / self.ee if self.ee else 0.0

    def standard_error(self, rms: float) -> float:
        """Return the standard error of the slope; noise with this root mean square sets its lower bound."""
        return max(self.cluster_variance, rms * rms * self.uu) ** 0.5 / self.uu if self.uu else float("inf")


def regress(tokens: ComparedTokens, direction: Tensor, rms: float) -> Regression:
    """Return the sums of the regression of e on one direction.

    Args:
        tokens: N tokens.
        direction: [N] nats, u times 1 - p + 0.01.
        rms: Root mean square of the noise.
    """
    e, u = tokens.error, direction / tokens.scale
    uu = (u * u).sum()
    if not uu:
        return Regression()
    eu = (e * u).sum()
    _, cluster = torch.unique(tokens.context, return_inverse=True)
    zeros = torch.zeros(int(cluster.max()) + 1, dtype=e.dtype)
    score = zeros.index_add(0, cluster, (e - eu / uu * u) * u)
    leverage = zeros.index_add(0, cluster, u * u) / uu
    variance = (score / (1 - leverage).clamp_min(1e-9)).square().sum()
    return Regression(eu.item(), uu.item(), (e * e).sum().item(), variance.item(), rms * rms * len(e))


@dataclass(frozen=True, slots=True)
class AuditFailure:
    """A failed test; its text is the error message."""

    test: str
    """Name of the test."""
    value: float
    allowed: float
    """Largest accepted value."""
    steps: int
    """Number of steps that were tested together."""

    def __str__(self) -> str:
        over = "this step" if self.steps == 1 else f"the last {self.steps} steps"
        return (
            f"over all tokens of {over} the log-probability check's {self.test} is {self.value:.4g}; the noise of this "
            f"model on this machine explains at most {self.allowed:.4g}. Likely cause: {CAUSES[self.test]}"
        )


class LogprobAudit:
    """Tests each step alone and together with the steps before it.

    Args:
        noise: The measured noise; read at each step.
    """

    def __init__(self, noise: NoiseEstimate) -> None:
        self._noise = noise
        self._regressions: deque[dict[str, Regression]] = deque(maxlen=WINDOW)
        self._outliers: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        """Outliers and tokens of each step."""
        self.metrics: dict[str, float] = {}
        """Values of the last step, by the names of the tests."""

    def check(
        self,
        tokens: ComparedTokens,
        rescored: Tensor,
        entropy: Tensor,
        alternatives: Mapping[str, tuple[ComparedTokens, Tensor]],
    ) -> AuditFailure | None:
        """Add one step and return the most specific failed test, None if all pass.

        Args:
            tokens: All N tokens of the step.
            rescored: [N] nats, the log-probabilities that the sampler rescored; NaN where it did not.
            entropy: [N] nats, of the distributions that the tokens were drawn from, under the claimed version.
            alternatives: By the direction's name, some n tokens and their log-probabilities [n] under that version.
        """
        rms, tail = self._noise.rms, self._noise.tail
        self.metrics = {"noise": rms}
        directions = {
            "shift": (tokens, torch.ones_like(entropy)),
            "temperature": (tokens, tokens.recomputed + entropy),
            "lean": (tokens, tokens.scale),
            **{name: (own, own.recomputed - other) for name, (own, other) in alternatives.items()},
        }
        self._regressions.append({name: regress(own, u, rms) for name, (own, u) in directions.items() if len(u)})
        self._outliers.append((int((tokens.error.abs() > OUTLIER * tail).sum()), len(entropy)))
        # A direction is more specific than a size, and the one that explains most is the most specific.
        spread, outliers = self._test_spread(tokens, rescored, rms), self._test_outliers()
        return next(iter(self._test_directions(rms) + spread + outliers), None)

    def _test_spread(self, tokens: ComparedTokens, rescored: Tensor, rms: float) -> list[AuditFailure]:
        known, allowed = ~rescored.isnan(), self._noise.bounds.max_spread
        self.metrics["rescored"] = known.double().mean().item()
        if known.sum() >= MIN_TOKENS:
            tokens, allowed = tokens.where(known), MAX_RESCORED_SPREAD
            rms = self._noise.rms_of(replace(tokens, recomputed=rescored[known]).error)
        ratio = tokens.error.square().mean().sqrt().item() / rms
        self.metrics["spread"] = ratio
        # Written so that a ratio of NaN fails too.
        return [] if ratio <= allowed else [AuditFailure("spread", ratio, allowed, 1)]

    def _test_outliers(self) -> list[AuditFailure]:
        failures = []
        for steps in dict.fromkeys((1, len(self._outliers))):
            last = list(self._outliers)[-steps:]
            outliers, tokens = (sum(part) for part in zip(*last, strict=True))
            allowed = 2 + tokens / 1000
            if steps == 1:
                self.metrics["strays"] = float(outliers)
            if outliers > allowed:
                failures.append(AuditFailure("strays", float(outliers), allowed, steps))
        return failures

    def _test_directions(self, rms: float) -> list[AuditFailure]:
        failures: list[tuple[float, AuditFailure]] = []
        for name in self._regressions[-1]:
            for steps in dict.fromkeys((1, len(self._regressions))):
                last = list(self._regressions)[-steps:]
                total = sum((of_step.get(name, Regression()) for of_step in last), Regression())
                if not total.uu:
                    continue
                allowed = _allowed_slope(name, total, rms) + Z * total.standard_error(rms)
                if steps == 1:
                    self.metrics[name] = total.slope
                if abs(total.slope) > allowed:
                    failures.append((total.explained, AuditFailure(name, total.slope, allowed, steps)))
        return [failure for _, failure in sorted(failures, key=lambda pair: -pair[0])]


def _allowed_slope(name: str, total: Regression, rms: float) -> float:
    """Return the allowed slope of a direction, besides its standard errors."""
    if name in ("shift", "lean"):
        return SYSTEMATIC * rms
    return min(0.5, SLACK + total.noise / total.uu)
