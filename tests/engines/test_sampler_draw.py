"""The sampling step alone: the right distribution, from a random number that depends on the request only."""

import math

import pytest
import torch

from harbortrainer.engines.local.sampler import draw as module
from harbortrainer.engines.local.sampler.draw import Draw, draw, request_seed, truncate

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])


def drawn(n: int, temperature: float = 1.0, **kept: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies [5] over `n` draws, and the log-probabilities that came with them."""
    request = Draw(7, temperature)
    uniform = torch.tensor([request.uniform(i) for i in range(n)])
    truncation = None
    if kept:
        keys = ("top_k", "top_p", "min_p")
        neutral = (-1.0, 1.0, 0.0)
        top_k, top_p, min_p = (torch.full((n,), kept.get(k, v)) for k, v in zip(keys, neutral, strict=True))
        truncation = (top_k, top_p, min_p)
    tokens, logprobs = draw(LOGITS.repeat(n, 1), uniform, torch.full((n,), temperature), truncation)
    return torch.bincount(tokens, minlength=5) / n, torch.stack([tokens.double(), logprobs.double()])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_tempered_softmax(temperature):
    expected = (LOGITS / temperature).softmax(-1)
    frequencies, pairs = drawn(40_000, temperature)
    assert torch.allclose(frequencies, expected, atol=0.01)
    tokens, logprobs = pairs[0].long(), pairs[1]
    assert torch.allclose(logprobs, expected.double().log()[tokens], atol=1e-6)


def test_temperature_zero_takes_the_likeliest_with_its_untempered_logprob():
    frequencies, pairs = drawn(10, 0.0)
    assert frequencies[0] == 1
    assert pairs[1][0] == pytest.approx(LOGITS.log_softmax(-1)[0].item())


@pytest.mark.parametrize(
    ("kept", "left"),
    [({"top_k": 2.0}, [0, 1]), ({"top_p": 0.7}, [0, 1]), ({"min_p": 0.3}, [0, 1]), ({"top_k": 1.0}, [0])],
)
def test_truncated_tokens_are_never_drawn_and_the_rest_is_normalized(kept, left):
    frequencies, pairs = drawn(4_000, **kept)
    assert set(frequencies.nonzero()[:, 0].tolist()) == set(left)
    expected = LOGITS[left].log_softmax(-1).double()
    assert torch.allclose(pairs[1], expected[pairs[0].long()], atol=1e-6)


def test_a_row_that_does_not_truncate_is_left_alone_beside_one_that_does():
    logprobs = LOGITS.log_softmax(-1).repeat(2, 1)
    kept = truncate(logprobs, torch.tensor([-1.0, 1.0]), torch.ones(2), torch.zeros(2))
    assert torch.allclose(kept[0], logprobs[0], atol=1e-6)
    assert kept[1, 0] == 0
    assert torch.isinf(kept[1, 1:]).all()


@pytest.mark.parametrize("truncates", [False, True])
def test_many_rows_are_drawn_some_at_a_time_and_as_they_would_be_at_once(truncates, monkeypatch):
    noise = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(7, 11, generator=noise), torch.rand(7, generator=noise)
    temperature = torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0, 0.0, 1.0])
    rest = torch.tensor([-1.0, 3, 2, 5, -1, 1, 4]), torch.linspace(0.5, 1, 7), torch.linspace(0, 0.3, 7)
    at_once = draw(logits, uniform, temperature, rest if truncates else None)
    sizes, drawn_at_once = [], module._draw
    monkeypatch.setattr(module, "_draw", lambda part, *more: sizes.append(len(part)) or drawn_at_once(part, *more))
    monkeypatch.setattr(module, "DRAWN_ELEMENTS", 33)
    in_parts = draw(logits, uniform, temperature, rest if truncates else None)
    assert sizes == [3, 3, 1]
    assert all(map(torch.equal, in_parts, at_once))


def test_the_random_number_depends_on_seed_and_position_only():
    assert Draw(1).uniform(5) == Draw(1, temperature=0.3).uniform(5)
    assert len({Draw(s).uniform(p) for s in range(30) for p in range(30)}) == 900
    assert all(0 < Draw(s).uniform(0) < 1 for s in range(1000))
    mean = sum(Draw(3).uniform(p) for p in range(5000)) / 5000
    assert math.isclose(mean, 0.5, abs_tol=0.02)


def test_seeds_differ_by_prompt_and_by_what_names_the_request():
    seeds = {request_seed("a", prompt=[1, 2]), request_seed("a", prompt=[1, 3]), request_seed("b", prompt=[1, 2])}
    assert len(seeds) == 3
    assert request_seed("a", prompt=(1, 2)) in seeds
