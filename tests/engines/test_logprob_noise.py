"""The noise estimate of the log-probability check: measurements, bounds, fallbacks, and lookup by context."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from harbortrainer.engines.local.learner.logprob_audit import OUTLIER
from harbortrainer.engines.local.learner.logprob_noise import (
    MAX_TOKENS,
    MIN_TOKENS,
    NOISE_BOUNDS,
    NoiseEstimate,
    RescoredLogprobs,
    error_scale,
)
from harbortrainer.engines.local.learner.micro_batch import pack
from harbortrainer.engines.local.learner.training_sample import Sample

BOUNDS = NOISE_BOUNDS[torch.bfloat16]


@dataclass
class Rescored:
    """The fields of `rescoring.Rescored` that the estimate reads."""

    logprobs: list[float]
    recomputed: list[float]
    version: int = 0
    temperature: float = 1.0
    token_ids: Sequence[int] = ()
    positions: Sequence[int] = ()
    crossed_update: bool = False


def noisy(size: float, tokens: int = 1000, logprob: float = -5.0, seed: int = 0) -> Rescored:
    """Return tokens whose recomputed log-probability differs by normal noise of `size`, in units of `error_scale`."""
    generator = torch.Generator().manual_seed(seed)
    recorded = torch.full((tokens,), logprob, dtype=torch.float64)
    noise = size * torch.randn(tokens, generator=generator, dtype=torch.float64) * error_scale(recorded, recorded)
    return Rescored(recorded.tolist(), (recorded + noise).tolist())


def estimate_noise(*rescored: Rescored) -> NoiseEstimate:
    noise = NoiseEstimate(BOUNDS)
    noise.measure(rescored)
    return noise


@pytest.mark.parametrize("logprob", [-5.0, -0.5, -0.05])
def test_noise_unit_is_the_same_for_certain_and_uncertain_tokens(logprob):
    assert estimate_noise(noisy(0.01, logprob=logprob)).rms == pytest.approx(0.01, rel=0.1)


def test_without_measurement_uses_dtype_bounds():
    assert (estimate_noise().rms, estimate_noise().tail) == (BOUNDS.max_rms, BOUNDS.max_tail)
    few = estimate_noise(noisy(0.01, tokens=MIN_TOKENS - 1))
    assert few.rms == BOUNDS.max_rms


@pytest.mark.parametrize(("size", "rms"), [(0.0, BOUNDS.min_rms), (3.0, BOUNDS.max_rms)])
def test_noise_is_clamped_to_bounds(size, rms):
    assert estimate_noise(noisy(size)).rms == rms


@pytest.mark.parametrize(("dtype", "rms"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6 / 12**0.5)])
def test_identical_rescoring_counts_as_logit_rounding(dtype, rms):
    """Between 2 and 4, bfloat16 numbers are 1/64 apart, and rounding errors are uniform."""
    noise = NoiseEstimate(NOISE_BOUNDS[dtype])
    assert noise.rms_of(torch.zeros(MIN_TOKENS)) == pytest.approx(rms, rel=0.2)
    assert noise.rms_of(torch.full((MIN_TOKENS,), 3 * rms)) == pytest.approx(3 * rms)


def test_sequences_that_crossed_update_are_a_fallback():
    crossed_update = replace(noisy(0.05, seed=1), crossed_update=True)
    assert estimate_noise(crossed_update).rms == pytest.approx(0.05, rel=0.1)
    assert estimate_noise(crossed_update, noisy(0.01)).rms == pytest.approx(0.01, rel=0.1)
    few = noisy(0.01, tokens=MIN_TOKENS - 1)
    assert estimate_noise(crossed_update, few).rms == pytest.approx(0.05, rel=0.1)


def test_wrong_tokens_do_not_raise_noise():
    wrong = noisy(0.014)
    wrong.logprobs[::100] = [lp - 0.5 for lp in wrong.logprobs[::100]]
    assert OUTLIER * estimate_noise(wrong).tail < 0.49, "the wrong tokens are outliers"
    assert estimate_noise(wrong).rms < 0.02


def test_only_the_newest_tokens_count():
    noise = estimate_noise(noisy(0.05, tokens=MAX_TOKENS))
    noise.measure([noisy(0.005, tokens=MAX_TOKENS)])
    assert noise.rms == pytest.approx(0.005, rel=0.1)


def sample(token_ids: list[int], sampled: set[int], version: int = 3, temperature: float = 1.0) -> Sample:
    mask = [i in sampled for i in range(len(token_ids))]
    return Sample(
        token_ids=token_ids, mask=mask, logprobs=[-1.0 * m for m in mask], versions=[version] * len(mask),
        temperature=temperature, advantage=1.0,
    )  # fmt: skip


def lookup(scores: RescoredLogprobs, *samples: Sample) -> list[float | None]:
    (micro_batch,) = pack(samples, 1000, torch.device("cpu"))
    tokens = micro_batch.tokens
    by_position = dict(
        zip(
            zip(tokens.sample.tolist(), tokens.position.tolist(), strict=True),
            scores.lookup(samples, tokens),
            strict=True,
        )
    )
    return [None if by_position[key].isnan() else by_position[key].item() for key in sorted(by_position)]


@pytest.fixture
def scores() -> RescoredLogprobs:
    """The answers 5, 6 and 9 of one conversation, rescored."""
    scores = RescoredLogprobs()
    scores.add([Rescored([-1.0] * 3, [-0.1, -0.2, -0.3], 3, 1.0, [1, 2, 5, 6, 7, 9], [2, 3, 5])])
    return scores


def test_lookup_by_context(scores):
    assert lookup(scores, sample([1, 2, 5, 6, 7, 9], {2, 3, 5})) == [-0.1, -0.2, -0.3]
    assert lookup(scores, sample([1, 2, 5, 6, 8, 9], {2, 3, 5})) == [-0.1, -0.2, None], "another context"
    assert lookup(scores, sample([1, 2, 4, 6], {2, 3}), sample([1, 2, 5], {2})) == [None, None, -0.1]
    assert lookup(scores, sample([1, 2, 5, 6, 7, 9], {4})) == [None], "not a sampled token"


def test_lookup_by_version_and_temperature(scores):
    assert lookup(scores, sample([1, 2, 5], {2}, version=2)) == [None]
    assert lookup(scores, sample([1, 2, 5], {2}, temperature=0.5)) == [None]


def test_evicts_rescored_logprobs_of_old_versions(scores):
    scores.evict_before(3)
    assert lookup(scores, sample([1, 2, 5], {2})) == [-0.1]
    scores.evict_before(4)
    assert lookup(scores, sample([1, 2, 5], {2})) == [None]
