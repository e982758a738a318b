"""The sampler's second scoring: plain transformers' numbers, of the version that sampled, beside sampling."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sampler_setup import LORA, Reference, generate, random_adapter, random_prompt
from tiny_model import build_tiny_model

from harbortrainer.engines.local.sampler import Sampler


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def sampler(model):
    with Sampler(model, seed=3) as running:
        yield running


def test_what_was_sampled_is_scored_again_and_agrees(sampler, model):
    prompt = random_prompt(20, seed=1)
    tokens = generate(sampler.url, prompt, temperature=0.7)["token_ids"]
    (scored,) = sampler.score_again()
    assert scored.again == pytest.approx(scored.logprobs, abs=1e-4)
    plain = Reference(model).logprobs(prompt, tokens, temperature=0.7)
    assert torch.allclose(torch.tensor(scored.again), plain, atol=1e-4)


def test_the_adapter_takes_part(sampler, model):
    adapter = random_adapter(model, seed=2)
    sampler.load_adapter(adapter, 1, config=LORA)
    prompt = random_prompt(20, seed=1)
    tokens = generate(sampler.url, prompt)["token_ids"]
    (scored,) = sampler.score_again()
    plain = Reference(model, adapter).logprobs(prompt, tokens)
    assert torch.allclose(torch.tensor(scored.again), plain, atol=1e-4)


def test_only_the_version_that_sampled_scores_and_only_once(sampler, model):
    generate(sampler.url, random_prompt(20, seed=1))
    sampler.load_adapter(random_adapter(model, seed=2), 1, config=LORA)
    assert sampler.score_again() == []
    generate(sampler.url, random_prompt(20, seed=1))
    assert len(sampler.score_again()) == 1
    assert sampler.score_again() == []


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_what_was_greedy_or_truncated_is_not_scored(sampler, sampling):
    generate(sampler.url, random_prompt(20, seed=1), **sampling)
    assert sampler.score_again() == []


def test_scoring_does_not_disturb_what_is_being_sampled(sampler):
    prompts = [random_prompt(30, seed=seed) for seed in range(8)]
    alone = [generate(sampler.url, prompt, seed=5)["token_ids"] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        beside = [pool.submit(generate, sampler.url, prompt, seed=5) for prompt in prompts]
        for _ in range(5):
            sampler.score_again()
        assert [asked.result()["token_ids"] for asked in beside] == alone


def test_in_bfloat16_the_difference_is_noise_and_not_nothing(model):
    with Sampler(model, dtype="bfloat16", seed=3) as sampler:
        for seed in range(8):
            generate(sampler.url, random_prompt(20, seed=seed), max_tokens=32)
        scored = sampler.score_again()
    difference = torch.tensor([b - a for s in scored for a, b in zip(s.logprobs, s.again, strict=True)])
    assert 1e-4 < difference.square().mean().sqrt() < 0.1
