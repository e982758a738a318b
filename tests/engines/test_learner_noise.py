"""The proof's yardstick: what it takes from a second scoring, and what it does not believe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from harbortrainer.engines.local.learner.evidence import STRAY
from harbortrainer.engines.local.learner.micro_batch import pack
from harbortrainer.engines.local.learner.proof import ENOUGH, NOISE_BOUNDS, POOL, Noise, SecondScores, share_left
from harbortrainer.engines.local.learner.training_sample import Sample

BOUNDS = NOISE_BOUNDS[torch.bfloat16]


@dataclass
class Scored:
    logprobs: list[float]
    again: list[float]
    version: int = 0
    temperature: float = 1.0
    token_ids: Sequence[int] = ()
    positions: Sequence[int] = ()
    overtaken: bool = False


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


@pytest.mark.parametrize(("dtype", "rms"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6 / 12**0.5)])
def test_a_sampler_that_computes_the_same_twice_is_taken_to_round_a_logit(dtype, rms):
    """Spacing of bfloat16 between 2 and 4: 1/64; a rounding is anywhere within it."""
    noise = Noise(NOISE_BOUNDS[dtype])
    assert noise.of_tokens(torch.zeros(ENOUGH)) == pytest.approx(rms, rel=0.2)
    assert noise.of_tokens(torch.full((ENOUGH,), 3 * rms)) == pytest.approx(3 * rms)


def test_what_a_hand_over_overtook_measures_only_where_nothing_else_does():
    overtaken = replace(noisy(0.05, seed=1), overtaken=True)
    assert measured(overtaken).rms == pytest.approx(0.05, rel=0.1)
    assert measured(overtaken, noisy(0.01)).rms == pytest.approx(0.01, rel=0.1)
    few = noisy(0.01, tokens=ENOUGH - 1)
    assert measured(overtaken, few).rms == pytest.approx(0.05, rel=0.1)


def test_one_token_in_a_hundred_that_is_wrong_does_not_pass_for_noise():
    wrong = noisy(0.014)
    wrong.logprobs[::100] = [lp - 0.5 for lp in wrong.logprobs[::100]]
    assert STRAY * measured(wrong).tail < 0.49, "the wrong ones lie beyond"
    assert measured(wrong).rms < 0.02


def test_only_the_newest_tokens_count():
    noise = measured(noisy(0.05, tokens=POOL))
    noise.measure([noisy(0.005, tokens=POOL)])
    assert noise.rms == pytest.approx(0.005, rel=0.1)


def sample(token_ids: list[int], sampled: set[int], version: int = 3, temperature: float = 1.0) -> Sample:
    mask = [i in sampled for i in range(len(token_ids))]
    return Sample(
        token_ids=token_ids, mask=mask, logprobs=[-1.0 * m for m in mask], versions=[version] * len(mask),
        temperature=temperature, advantage=1.0,
    )  # fmt: skip


def second(scores: SecondScores, *samples: Sample) -> list[float | None]:
    (micro_batch,) = pack(samples, 1000, torch.device("cpu"))
    tokens = micro_batch.tokens
    found = dict(
        zip(zip(tokens.sample.tolist(), tokens.position.tolist(), strict=True), scores.of(samples, tokens), strict=True)
    )
    return [None if found[place].isnan() else found[place].item() for place in sorted(found)]


@pytest.fixture
def scores() -> SecondScores:
    """The answers 5, 6 and 9 of one conversation, scored again."""
    scores = SecondScores()
    scores.add([Scored([-1.0] * 3, [-0.1, -0.2, -0.3], 3, 1.0, [1, 2, 5, 6, 7, 9], [2, 3, 5])])
    return scores


def test_a_token_finds_its_second_score_by_all_that_went_before(scores):
    assert second(scores, sample([1, 2, 5, 6, 7, 9], {2, 3, 5})) == [-0.1, -0.2, -0.3]
    assert second(scores, sample([1, 2, 5, 6, 8, 9], {2, 3, 5})) == [-0.1, -0.2, None], "told something else"
    assert second(scores, sample([1, 2, 4, 6], {2, 3}), sample([1, 2, 5], {2})) == [None, None, -0.1]
    assert second(scores, sample([1, 2, 5, 6, 7, 9], {4})) == [None], "it was not sampled there"


def test_a_second_score_is_of_one_version_at_one_temperature(scores):
    assert second(scores, sample([1, 2, 5], {2}, version=2)) == [None]
    assert second(scores, sample([1, 2, 5], {2}, temperature=0.5)) == [None]


def test_second_scores_of_versions_that_train_no_more_are_forgotten(scores):
    scores.forget_before(3)
    assert second(scores, sample([1, 2, 5], {2})) == [-0.1]
    scores.forget_before(4)
    assert second(scores, sample([1, 2, 5], {2})) == [None]
