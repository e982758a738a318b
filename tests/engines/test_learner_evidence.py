"""The statistics of the proof on made-up tokens: what each test sees, and that noise alone is nobody's fault."""

import pytest
import torch
from test_learner_noise import BOUNDS, noisy

from harbortrainer.engines.local.learner.evidence import WINDOW, Compared, Doubt, Evidence, Slope, line
from harbortrainer.engines.local.learner.proof import Noise

RMS = 0.01


class Step:
    """Tokens of one step with noise of `RMS`, and a version that lies `apart` from the one that is claimed."""

    def __init__(self, seed: int, tokens: int = 1000, apart: float = 0.1) -> None:
        random = torch.Generator().manual_seed(seed)

        def normal() -> torch.Tensor:
            return torch.randn(tokens, generator=random, dtype=torch.float64)

        self.truth = -3.0 * torch.rand(tokens, generator=random, dtype=torch.float64) - 0.01
        self.entropy = torch.full_like(self.truth, 1.0) + 0.5 * torch.rand(tokens, generator=random)
        self.left = 1 - self.truth.exp() + 0.01
        self.other = self.truth + (apart * normal() + RMS / 2**0.5 * normal()) * self.left
        self.recomputed = self.truth + RMS / 2**0.5 * normal() * self.left
        self.recorded = self.truth + RMS / 2**0.5 * normal() * self.left
        self.again = torch.full_like(self.truth, torch.nan)
        self.context = torch.arange(tokens) + tokens * seed

    def weighed(self, evidence: Evidence) -> Doubt | None:
        tokens = Compared(self.recorded, self.recomputed, self.context)
        return evidence.weigh(tokens, self.again, self.entropy, {"before": (tokens, self.other)})


@pytest.fixture
def evidence() -> Evidence:
    noise = Noise(BOUNDS)
    noise.measure([noisy(RMS, tokens=2000)])
    return Evidence(noise)


def test_noise_alone_is_no_evidence_in_a_thousand_steps(evidence):
    assert [str(f) for seed in range(1000) if (f := Step(seed, tokens=300).weighed(evidence))] == []


@pytest.mark.parametrize("apart", [0.003, 0.01, 0.1, 1.0])
def test_a_version_that_differs_by_less_or_more_than_the_noise_is_not_taken_for_the_other(evidence, apart):
    assert [str(f) for seed in range(100) if (f := Step(seed, apart=apart).weighed(evidence))] == []


def spoil(step: Step, fault: str) -> None:
    if fault == "shift":
        step.recorded -= 0.05
    elif fault == "strays":
        step.recorded[::100] -= 0.5
    elif fault == "temperature":
        step.recorded += 0.1 * (step.truth + step.entropy)
    elif fault == "lean":
        step.recorded += 0.02 * step.left
    elif fault == "before":
        step.recorded += step.other - step.truth
    elif fault == "spread":
        step.recorded += step.left * 1.2 * BOUNDS.most_spread * RMS * torch.tensor([1.0, -1.0]).repeat(500)


@pytest.mark.parametrize("fault", ["shift", "strays", "temperature", "lean", "before", "spread"])
def test_each_fault_is_found_by_its_own_test_and_named(evidence, fault):
    step = Step(0)
    spoil(step, fault)
    finding = step.weighed(evidence)
    assert finding is not None
    assert finding.test == fault
    assert "Likely cause" in str(finding)


def scored_again(step: Step, tokens: int, noise: float) -> None:
    """The sampler scored the first tokens again, and differs from itself by this much."""
    wave = torch.tensor([1.0, -1.0]).repeat(tokens // 2)
    step.again[:tokens] = step.recorded[:tokens] + wave * noise * step.left[:tokens]


@pytest.mark.parametrize(("noise", "found"), [(0.5 * RMS, True), (1.5 * RMS, False), (20 * RMS, False)])
def test_tokens_that_were_scored_again_are_held_against_their_own_noise(evidence, noise, found):
    step = Step(0)
    scored_again(step, 500, noise)
    # Far below what all tokens may be off by, and no other test's business.
    step.recorded[:500] += 1.5 * RMS * torch.tensor([1.0, -1.0]).repeat(250) * step.left[:500]
    step.again[:500] += 1.5 * RMS * torch.tensor([1.0, -1.0]).repeat(250) * step.left[:500]
    doubt = step.weighed(evidence)
    assert (doubt is not None and doubt.test == "spread") == found
    assert evidence.figures["rescored"] == 0.5


def test_a_few_tokens_that_were_scored_again_are_no_yardstick(evidence):
    step = Step(0)
    scored_again(step, 98, 0.0)
    assert step.weighed(evidence) is None


def test_a_small_fault_is_found_by_the_steps_together(evidence):
    found = []
    for seed in range(WINDOW):
        step = Step(seed, tokens=200)
        step.recorded += 0.006 * step.left
        found.append(step.weighed(evidence))
    assert found[0] is None
    assert found[-1] is not None and found[-1].steps > 1


def test_tokens_that_repeat_each_other_count_once():
    step = Step(0, tokens=100)
    once = line(Compared(step.recorded, step.recomputed, step.context), step.left, RMS / 100)
    eight = Compared(*(t.repeat(8) for t in (step.recorded, step.recomputed, step.context)))
    again = line(eight, step.left.repeat(8), RMS / 100)
    assert again.slope == pytest.approx(once.slope)
    assert again.error(RMS / 100) == pytest.approx(once.error(RMS / 100), rel=0.01)


def test_one_heavy_token_proves_nothing():
    step = Step(0, tokens=100)
    direction = step.left * 1e-6
    direction[7] = step.left[7]
    heavy = line(Compared(step.recorded, step.recomputed, step.context), direction, RMS)
    assert abs(heavy.slope) < 6 * heavy.error(RMS)


def test_a_direction_without_length_says_nothing():
    assert Slope().slope == 0
    assert Slope().error(RMS) == float("inf")
