"""The log-probability audit on synthetic tokens: each fault fails its own test, and noise alone fails none."""

import pytest
import torch
from test_logprob_noise import BOUNDS, noisy

from harbortrainer.engines.local.learner.logprob_audit import (
    WINDOW,
    AuditFailure,
    ComparedTokens,
    LogprobAudit,
    Regression,
    regress,
)
from harbortrainer.engines.local.learner.logprob_noise import NoiseEstimate

RMS = 0.01


class SyntheticStep:
    """Synthetic tokens of one step, with noise of `RMS` and an alternative version.

    Args:
        distance: Size of the difference between the alternative version and the recorded one.
    """

    def __init__(self, seed: int, tokens: int = 1000, distance: float = 0.1) -> None:
        random = torch.Generator().manual_seed(seed)

        def normal() -> torch.Tensor:
            return torch.randn(tokens, generator=random, dtype=torch.float64)

        self.truth = -3.0 * torch.rand(tokens, generator=random, dtype=torch.float64) - 0.01
        self.entropy = torch.full_like(self.truth, 1.0) + 0.5 * torch.rand(tokens, generator=random)
        self.scale = 1 - self.truth.exp() + 0.01
        self.alternative = self.truth + (distance * normal() + RMS / 2**0.5 * normal()) * self.scale
        self.recomputed = self.truth + RMS / 2**0.5 * normal() * self.scale
        self.recorded = self.truth + RMS / 2**0.5 * normal() * self.scale
        self.rescored = torch.full_like(self.truth, torch.nan)
        self.context = torch.arange(tokens) + tokens * seed

    def check(self, audit: LogprobAudit) -> AuditFailure | None:
        tokens = ComparedTokens(self.recorded, self.recomputed, self.context)
        return audit.check(tokens, self.rescored, self.entropy, {"before": (tokens, self.alternative)})


@pytest.fixture
def audit() -> LogprobAudit:
    noise = NoiseEstimate(BOUNDS)
    noise.measure([noisy(RMS, tokens=2000)])
    return LogprobAudit(noise)


def test_noise_alone_passes_a_thousand_steps(audit):
    assert [str(f) for seed in range(1000) if (f := SyntheticStep(seed, tokens=300).check(audit))] == []


@pytest.mark.parametrize("distance", [0.003, 0.01, 0.1, 1.0])
def test_alternative_version_is_not_blamed(audit, distance):
    assert [str(f) for seed in range(100) if (f := SyntheticStep(seed, distance=distance).check(audit))] == []


def inject_fault(step: SyntheticStep, fault: str) -> None:
    if fault == "shift":
        step.recorded -= 0.05
    elif fault == "strays":
        step.recorded[::100] -= 0.5
    elif fault == "temperature":
        step.recorded += 0.1 * (step.truth + step.entropy)
    elif fault == "lean":
        step.recorded += 0.02 * step.scale
    elif fault == "before":
        step.recorded += step.alternative - step.truth
    elif fault == "spread":
        step.recorded += step.scale * 1.2 * BOUNDS.max_spread * RMS * torch.tensor([1.0, -1.0]).repeat(500)


@pytest.mark.parametrize("fault", ["shift", "strays", "temperature", "lean", "before", "spread"])
def test_each_fault_fails_its_own_test(audit, fault):
    step = SyntheticStep(0)
    inject_fault(step, fault)
    failure = step.check(audit)
    assert failure is not None
    assert failure.test == fault
    assert "Likely cause" in str(failure)


def rescore_tokens(step: SyntheticStep, tokens: int, noise: float) -> None:
    """Set the rescored log-probabilities of the first tokens, with noise of this size."""
    wave = torch.tensor([1.0, -1.0]).repeat(tokens // 2)
    step.rescored[:tokens] = step.recorded[:tokens] + wave * noise * step.scale[:tokens]


@pytest.mark.parametrize(("noise", "detected"), [(0.5 * RMS, True), (1.5 * RMS, False), (20 * RMS, False)])
def test_rescored_tokens_are_compared_with_own_noise(audit, noise, detected):
    step = SyntheticStep(0)
    rescore_tokens(step, 500, noise)
    # Far below the limit over all tokens, and no other test detects it.
    step.recorded[:500] += 1.5 * RMS * torch.tensor([1.0, -1.0]).repeat(250) * step.scale[:500]
    step.rescored[:500] += 1.5 * RMS * torch.tensor([1.0, -1.0]).repeat(250) * step.scale[:500]
    failure = step.check(audit)
    assert (failure is not None and failure.test == "spread") == detected
    assert audit.metrics["rescored"] == 0.5


def test_few_rescored_tokens_are_not_used(audit):
    step = SyntheticStep(0)
    rescore_tokens(step, 98, 0.0)
    assert step.check(audit) is None


def test_window_finds_small_fault(audit):
    failures = []
    for seed in range(WINDOW):
        step = SyntheticStep(seed, tokens=200)
        step.recorded += 0.006 * step.scale
        failures.append(step.check(audit))
    assert failures[0] is None
    assert failures[-1] is not None and failures[-1].steps > 1


def test_repeated_tokens_count_once():
    step = SyntheticStep(0, tokens=100)
    once = regress(ComparedTokens(step.recorded, step.recomputed, step.context), step.scale, RMS / 100)
    repeated = ComparedTokens(*(t.repeat(8) for t in (step.recorded, step.recomputed, step.context)))
    all_eight = regress(repeated, step.scale.repeat(8), RMS / 100)
    assert all_eight.slope == pytest.approx(once.slope)
    assert all_eight.standard_error(RMS / 100) == pytest.approx(once.standard_error(RMS / 100), rel=0.01)


def test_one_heavy_token_is_not_significant():
    step = SyntheticStep(0, tokens=100)
    direction = step.scale * 1e-6
    direction[7] = step.scale[7]
    heavy = regress(ComparedTokens(step.recorded, step.recomputed, step.context), direction, RMS)
    assert abs(heavy.slope) < 6 * heavy.standard_error(RMS)


def test_zero_direction_has_no_slope():
    assert Regression().slope == 0
    assert Regression().standard_error(RMS) == float("inf")
