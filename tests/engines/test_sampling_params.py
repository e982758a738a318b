"""The sampling step: its distribution, and random numbers that depend on the request only."""

import math

import pytest
import torch

from harbortrainer.engines.local.sampler import sampling_params as module
from harbortrainer.engines.local.sampler.sampling_params import SamplingParams, request_seed, sample_tokens, truncate

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])


def sample_many(n: int, temperature: float = 1.0, **settings: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return frequencies [5] over `n` samples, and their log-probabilities."""
    request = SamplingParams(7, temperature)
    uniform = torch.tensor([request.uniform(i) for i in range(n)])
    truncation = None
    if settings:
        keys = ("top_k", "top_p", "min_p")
        neutral = (-1.0, 1.0, 0.0)
        top_k, top_p, min_p = (torch.full((n,), settings.get(k, v)) for k, v in zip(keys, neutral, strict=True))
        truncation = (top_k, top_p, min_p)
    tokens, logprobs = sample_tokens(LOGITS.repeat(n, 1), uniform, torch.full((n,), temperature), truncation)
    return torch.bincount(tokens, minlength=5) / n, torch.stack([tokens.double(), logprobs.double()])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_tempered_softmax(temperature):
    expected = (LOGITS / temperature).softmax(-1)
    frequencies, pairs = sample_many(40_000, temperature)
    assert torch.allclose(frequencies, expected, atol=0.01)
    tokens, logprobs = pairs[0].long(), pairs[1]
    assert torch.allclose(logprobs, expected.double().log()[tokens], atol=1e-6)


def test_temperature_zero_is_greedy_with_untempered_logprob():
    frequencies, pairs = sample_many(10, 0.0)
    assert frequencies[0] == 1
    assert pairs[1][0] == pytest.approx(LOGITS.log_softmax(-1)[0].item())


@pytest.mark.parametrize(
    ("settings", "remaining"),
    [({"top_k": 2.0}, [0, 1]), ({"top_p": 0.7}, [0, 1]), ({"min_p": 0.3}, [0, 1]), ({"top_k": 1.0}, [0])],
)
def test_excluded_tokens_are_never_sampled_and_rest_is_normalized(settings, remaining):
    frequencies, pairs = sample_many(4_000, **settings)
    assert set(frequencies.nonzero()[:, 0].tolist()) == set(remaining)
    expected = LOGITS[remaining].log_softmax(-1).double()
    assert torch.allclose(pairs[1], expected[pairs[0].long()], atol=1e-6)


def test_truncation_does_not_affect_other_rows():
    logprobs = LOGITS.log_softmax(-1).repeat(2, 1)
    kept = truncate(logprobs, torch.tensor([-1.0, 1.0]), torch.ones(2), torch.zeros(2))
    assert torch.allclose(kept[0], logprobs[0], atol=1e-6)
    assert kept[1, 0] == 0
    assert torch.isinf(kept[1, 1:]).all()


@pytest.mark.parametrize("truncates", [False, True])
def test_chunked_sampling_equals_unchunked(truncates, monkeypatch):
    noise = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(7, 11, generator=noise), torch.rand(7, generator=noise)
    temperature = torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0, 0.0, 1.0])
    truncation = torch.tensor([-1.0, 3, 2, 5, -1, 1, 4]), torch.linspace(0.5, 1, 7), torch.linspace(0, 0.3, 7)
    unchunked = sample_tokens(logits, uniform, temperature, truncation if truncates else None)
    sizes, sample_chunk = [], module._sample_chunk
    monkeypatch.setattr(
        module, "_sample_chunk", lambda part, *more: sizes.append(len(part)) or sample_chunk(part, *more)
    )
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", 33)
    chunked = sample_tokens(logits, uniform, temperature, truncation if truncates else None)
    assert sizes == [3, 3, 1]
    assert all(map(torch.equal, chunked, unchunked))


def test_random_number_depends_on_seed_and_position_only():
    assert SamplingParams(1).uniform(5) == SamplingParams(1, temperature=0.3).uniform(5)
    assert len({SamplingParams(s).uniform(p) for s in range(30) for p in range(30)}) == 900
    assert all(0 < SamplingParams(s).uniform(0) < 1 for s in range(1000))
    mean = sum(SamplingParams(3).uniform(p) for p in range(5000)) / 5000
    assert math.isclose(mean, 0.5, abs_tol=0.02)


def test_seeds_differ_by_prompt_and_request():
    seeds = {request_seed("a", prompt=[1, 2]), request_seed("a", prompt=[1, 3]), request_seed("b", prompt=[1, 2])}
    assert len(seeds) == 3
    assert request_seed("a", prompt=(1, 2)) in seeds
