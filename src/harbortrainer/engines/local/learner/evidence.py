"""Evidence, over all tokens of a step and of the last steps, that log-probabilities are not what they claim to be.

With e a token's recomputed minus its recorded log-probability over 1 - p + 0.01 (`proof.py`), there are two tests of
size and some of direction. In a run without fault e is noise, and has no direction.

- `spread`: the root mean square of e against that of the measured noise: over the tokens that the sampler scored again
  against what they differ by there, over all tokens where those are few.
- `strays`: tokens whose |e| lies far outside of the largest noise.
- Along u, what a fault would do to e, the coefficient b = sum(e u) / sum(u u) is 0 within its standard error:
    `shift`       a constant, u = 1 / (1 - p + 0.01);
    `lean`        a constant share of 1 - p, u = 1 (a truncated distribution, top_k or top_p);
    `temperature` u ~ log p + H, the derivative of log p by the inverse temperature (b = 1 - 1/T);
    `before`, `after`, `base`, `larger`: u ~ log p under the claimed version minus log p under another: the one before,
                  the one after, the base model, the claimed adapter times 1.2. At 1 it is the other one that sampled.

The standard error is the one of clusters that White (1980) gives, each cluster a context with its token (trials of one
group repeat each other), each residual divided by 1 - leverage, so that one heavy token proves nothing. u and e share
the rounding of one forward pass, which alone makes b up to noise / sum(u u); that much is allowed, and a systematic
share of the noise too. State without I/O.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from harbortrainer.engines.local.learner.proof import ENOUGH, Noise, share_left

Z = 6.0
"""Standard errors beyond what is allowed: 2e-9 a test under normal noise."""
WINDOW = 10
"""Steps whose evidence is added up, beside each step on its own."""
MOST_SPREAD = 2.0
"""Times the sampler's own difference that the trained tokens' may be, on the same tokens."""
STRAY = 3.0
"""Times the largest noise."""
SYSTEMATIC = 0.25
"""Share of the noise's root mean square that may be systematic."""
SLACK = 0.02
"""Largest coefficient that is nobody's fault, along a direction that is a version or the temperature."""

CAUSES = {
    "spread": "the sampler does not compute with the learner's weights (its base model, its precision, its adapter)",
    "strays": "some of the log-probabilities were changed, or their tokens were",
    "shift": "every log-probability is off by a constant",
    "lean": "the engine sampled from a truncated distribution (top_k, top_p, min_p), or with another one's weights",
    "temperature": "the engine sampled at another temperature than the run's, or with top_k, top_p or min_p",
    "before": "the version that really sampled is the one before the one that is claimed",
    "after": "the version that really sampled is the one after the one that is claimed",
    "base": "the sampler's weights were never updated (1), or are others than the learner's",
    "larger": "the sampler's adapter is scaled (0.25 is 1.05 times too large), or is another one than the learner's",
}


@dataclass(frozen=True, slots=True)
class Compared:
    """N tokens with both of their log-probabilities under the version that is claimed; float64 on the CPU."""

    recorded: Tensor
    recomputed: Tensor
    context: Tensor
    """[N] int64, equal where a token and everything before it are equal."""

    @property
    def weight(self) -> Tensor:
        return share_left(self.recorded, self.recomputed)

    @property
    def error(self) -> Tensor:
        return (self.recomputed - self.recorded) / self.weight

    def where(self, chosen: Tensor) -> "Compared":
        """The tokens at which `chosen`, a mask or indices, points."""
        return Compared(self.recorded[chosen], self.recomputed[chosen], self.context[chosen])

    @classmethod
    def joined(cls, parts: Sequence["Compared"]) -> "Compared":
        """The tokens of all parts, one after the other; at least one part."""
        return cls(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)))


@dataclass(frozen=True, slots=True)
class Slope:
    """One direction's sums over some tokens; those of several steps add up."""

    eu: float = 0.0
    uu: float = 0.0
    ee: float = 0.0
    spread: float = 0.0
    """Sum over the clusters of (sum of residual times u / (1 - leverage)) squared."""
    noise: float = 0.0
    """What the noise alone adds to `uu` at most."""

    def __add__(self, other: "Slope") -> "Slope":
        return Slope(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def slope(self) -> float:
        return self.eu / self.uu if self.uu else 0.0

    @property
    def explained(self) -> float:
        """The share of sum(e e) that this direction explains."""
        return self.eu * self.slope / self.ee if self.ee else 0.0

    def error(self, rms: float) -> float:
        """The standard error of the slope, never under what noise of this size gives."""
        return max(self.spread, rms * rms * self.uu) ** 0.5 / self.uu if self.uu else float("inf")


def line(tokens: Compared, direction: Tensor, rms: float) -> Slope:
    """The sums of one direction, given in nats like the differences."""
    e, u = tokens.error, direction / tokens.weight
    uu = (u * u).sum()
    if not uu:
        return Slope()
    eu = (e * u).sum()
    _, cluster = torch.unique(tokens.context, return_inverse=True)
    zeros = torch.zeros(int(cluster.max()) + 1, dtype=e.dtype)
    score = zeros.index_add(0, cluster, (e - eu / uu * u) * u)
    leverage = zeros.index_add(0, cluster, u * u) / uu
    spread = (score / (1 - leverage).clamp_min(1e-9)).square().sum()
    return Slope(eu.item(), uu.item(), (e * e).sum().item(), spread.item(), rms * rms * len(e))


@dataclass(frozen=True, slots=True)
class Doubt:
    """A test that failed, in words."""

    test: str
    figure: float
    allowed: float
    steps: int

    def __str__(self) -> str:
        over = "this step" if self.steps == 1 else f"the last {self.steps} steps"
        return (
            f"over all tokens of {over} the proof's {self.test} is {self.figure:.4g}, where at most {self.allowed:.4g} "
            f"is the noise of this model on this machine. Likely cause: {CAUSES[self.test]}"
        )


class Evidence:
    """Weighs each step alone and together with those before it.

    Args:
        noise: The measured noise; read at each step.
    """

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._lines: deque[dict[str, Slope]] = deque(maxlen=WINDOW)
        self._strays: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self.figures: dict[str, float] = {}

    def weigh(
        self, tokens: Compared, again: Tensor, entropy: Tensor, rivals: Mapping[str, tuple[Compared, Tensor]]
    ) -> Doubt | None:
        """Take in one step; the first test that fails, None when all hold.

        Args:
            tokens: All tokens of the step.
            again: [N] nats, the sampler's second scoring; NaN where it did none.
            entropy: [N] of the distributions they were drawn from, under the claimed version.
            rivals: By the direction's name, some tokens and their log-probability under that other version.
        """
        rms, tail = self._noise.rms, self._noise.tail
        self.figures = {"noise": rms}
        directions = {
            "shift": (tokens, torch.ones_like(entropy)),
            "temperature": (tokens, tokens.recomputed + entropy),
            "lean": (tokens, tokens.weight),
            **{name: (own, own.recomputed - other) for name, (own, other) in rivals.items()},
        }
        self._lines.append({name: line(own, u, rms) for name, (own, u) in directions.items() if len(u)})
        self._strays.append((int((tokens.error.abs() > STRAY * tail).sum()), len(entropy)))
        # A direction says more about the cause than a size does, and most where it explains most.
        spread, strays, directed = self._spread(tokens, again, rms), self._strays_found(), self._directions(rms)
        return next(iter(directed + spread + strays), None)

    def _spread(self, tokens: Compared, again: Tensor, rms: float) -> list[Doubt]:
        known, most = ~again.isnan(), self._noise.bounds.most_spread
        self.figures["rescored"] = known.double().mean().item()
        if known.sum() >= ENOUGH:
            tokens, most = tokens.where(known), MOST_SPREAD
            rms = self._noise.of_tokens(replace(tokens, recomputed=again[known]).error)
        ratio = tokens.error.square().mean().sqrt().item() / rms
        self.figures["spread"] = ratio
        # Written so that a ratio that is not a number fails too.
        return [] if ratio <= most else [Doubt("spread", ratio, most, 1)]

    def _strays_found(self) -> list[Doubt]:
        found = []
        for steps in dict.fromkeys((1, len(self._strays))):
            last = list(self._strays)[-steps:]
            strays, tokens = (sum(part) for part in zip(*last, strict=True))
            allowed = 2 + tokens / 1000
            if steps == 1:
                self.figures["strays"] = float(strays)
            if strays > allowed:
                found.append(Doubt("strays", float(strays), allowed, steps))
        return found

    def _directions(self, rms: float) -> list[Doubt]:
        found: list[tuple[float, Doubt]] = []
        for name in self._lines[-1]:
            for steps in dict.fromkeys((1, len(self._lines))):
                total = sum((lines.get(name, Slope()) for lines in list(self._lines)[-steps:]), Slope())
                if not total.uu:
                    continue
                allowed = _allowed(name, total, rms) + Z * total.error(rms)
                if steps == 1:
                    self.figures[name] = total.slope
                if abs(total.slope) > allowed:
                    found.append((total.explained, Doubt(name, total.slope, allowed, steps)))
        return [finding for _, finding in sorted(found, key=lambda pair: -pair[0])]


def _allowed(name: str, total: Slope, rms: float) -> float:
    """What a direction's slope may be beside its standard error."""
    if name in ("shift", "lean"):
        return SYSTEMATIC * rms
    return min(0.5, SLACK + total.noise / total.uu)
