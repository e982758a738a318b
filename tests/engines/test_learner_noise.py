"""The proof's yardstick: what it takes from a second scoring, and what it does not believe."""

from dataclasses import dataclass

import pytest
import torch

from harbortrainer.engines.local.learner.proof import ENOUGH, NOISE_BOUNDS, POOL, Noise, share_left

BOUNDS = NOISE_BOUNDS[torch.bfloat16]


@dataclass
class Scored:
    logprobs: list[float]
    again: list[float]


def noisy(size: float, tokens: int = 1000, logprob: float = -5.0, seed: int = 0) -> Scored:
    """Tokens whose second log-probability differs by normal noise of `size` in units of e."""
    generator = torch.Generator().manual_seed(seed)
    recorded = torch.full((tokens,), logprob, dtype=torch.float64)
    off = size * torch.randn(tokens, generator=generator, dtype=torch.float64) * share_left(recorded, recorded)
    return Scored(recorded.tolist(), (recorded + off).tolist())


def measured(*scored: Scored) -> Noise:
    noise = Noise(BOUNDS)
    noise.measure(scored)
    return noise


@pytest.mark.parametrize("logprob", [-5.0, -0.5, -0.05])
def test_noise_of_sure_and_unsure_tokens_has_one_unit(logprob):
    assert measured(noisy(0.01, logprob=logprob)).rms == pytest.approx(0.01, rel=0.1)


def test_without_a_measurement_the_dtype_alone_decides():
    assert (measured().rms, measured().tail) == (BOUNDS.most_rms, BOUNDS.most_tail)
    few = measured(noisy(0.01, tokens=ENOUGH - 1))
    assert few.rms == BOUNDS.most_rms


@pytest.mark.parametrize(("size", "rms"), [(0.0, BOUNDS.least_rms), (3.0, BOUNDS.most_rms)])
def test_noise_is_believed_within_bounds(size, rms):
    assert measured(noisy(size)).rms == rms


def test_one_token_in_a_hundred_that_is_wrong_does_not_pass_for_noise():
    wrong = noisy(0.01)
    wrong.logprobs[::100] = [lp - 0.5 for lp in wrong.logprobs[::100]]
    assert measured(wrong).tail < 0.15
    assert measured(wrong).rms < 0.02


def test_only_the_newest_tokens_count():
    noise = measured(noisy(0.05, tokens=POOL))
    noise.measure([noisy(0.005, tokens=POOL)])
    assert noise.rms == pytest.approx(0.005, rel=0.1)
