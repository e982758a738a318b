"""Rescoring: matches plain transformers, uses the sampling version, and does not disturb sampling."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sampler_setup import LORA, Reference, generate, logprobs_of, random_adapter, random_prompt
from tiny_model import build_tiny_model

from harbortrainer.engines.local.sampler import Completion, Sampler, rescoring, sampled_model
from harbortrainer.engines.local.sampler.rescoring import RecentSamples, SampledSequence, select_evenly
from harbortrainer.engines.local.sampler.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def sampler(model):
    with Sampler(model, seed=3) as running:
        yield running


def test_rescored_logprobs_agree(sampler, model):
    prompt = random_prompt(20, seed=1)
    tokens = generate(sampler.url, prompt, temperature=0.7)["token_ids"]
    (scored,) = sampler.rescore()
    assert scored.recomputed == pytest.approx(scored.logprobs, abs=1e-4)
    plain = Reference(model).logprobs(prompt, tokens, temperature=0.7)
    assert torch.allclose(torch.tensor(scored.recomputed), plain, atol=1e-4)


def test_rescoring_uses_the_adapter(sampler, model):
    adapter = random_adapter(model, seed=2)
    sampler.load_adapter(adapter, 1, config=LORA)
    prompt = random_prompt(20, seed=1)
    tokens = generate(sampler.url, prompt)["token_ids"]
    (scored,) = sampler.rescore()
    plain = Reference(model, adapter).logprobs(prompt, tokens)
    assert torch.allclose(torch.tensor(scored.recomputed), plain, atol=1e-4)


def test_turns_of_a_trial_are_rescored_in_one_pass(sampler, model):
    prompt, turns = random_prompt(20, seed=1), []
    for next_message in (random_prompt(5, seed=2), random_prompt(3, seed=4), []):
        choice = generate(sampler.url, prompt, session="a trial", ignore_eos=True)
        turns.append((list(prompt), choice["token_ids"], logprobs_of(choice)))
        generate(sampler.url, random_prompt(4, seed=len(prompt)), session="another trial")
        prompt = [*prompt, *choice["token_ids"], *next_message]
    scored = next(scored for scored in sampler.rescore() if len(scored.positions) == 48)
    assert scored.token_ids == [*turns[-1][0], *turns[-1][1]]
    assert [scored.token_ids[t] for t in scored.positions] == [t for _, ids, _ in turns for t in ids]
    assert scored.logprobs == pytest.approx([lp for *_, lps in turns for lp in lps])
    plain = [Reference(model).logprobs(before, ids) for before, ids, _ in turns]
    assert torch.allclose(torch.tensor(scored.recomputed), torch.cat(plain), atol=1e-4)


@pytest.mark.parametrize(("other_prompt", "temperature"), [([9, 9, 9], 1.0), ([], 0.5)])
def test_unrelated_request_starts_a_new_sequence(sampler, other_prompt, temperature):
    prompt = random_prompt(20, seed=1)
    first = generate(sampler.url, prompt, session="a trial", ignore_eos=True)["token_ids"]
    # Another history (a summary, dropped reasoning), or the same history at another temperature.
    prompt = other_prompt or [*prompt, *first]
    generate(sampler.url, prompt, session="a trial", temperature=temperature, ignore_eos=True)
    assert [len(scored.positions) for scored in sampler.rescore()] == [16, 16]


def test_sequences_in_a_pass_are_independent(sampler, model, monkeypatch):
    requests = {seed: (random_prompt(5 * seed, seed=seed), 1.0 + seed / 4) for seed in range(1, 6)}
    tokens = {s: generate(sampler.url, p, session=str(s), temperature=t)["token_ids"] for s, (p, t) in requests.items()}
    monkeypatch.setattr(rescoring, "_PASS_TOKENS", 60)
    found = {tuple(scored.token_ids): scored for scored in sampler.rescore()}
    assert len(found) == len(requests)
    for seed, (prompt, temperature) in requests.items():
        plain = Reference(model).logprobs(prompt, tokens[seed], temperature)
        scored = found[*prompt, *tokens[seed]]
        assert torch.allclose(torch.tensor(scored.recomputed), plain, atol=1e-4)


@pytest.mark.parametrize("attention", ["ragged", "sdpa"])
def test_common_prompt_and_equal_answers_are_computed_once(model, monkeypatch, attention):
    monkeypatch.setattr(sampled_model, "attention_for", lambda config: attention)
    computed: list[int] = []
    prompt = random_prompt(60, seed=1)
    with Sampler(model, seed=3) as sampler:
        answers = [
            generate(sampler.url, prompt, session=str(i), temperature=t, seed=5 if i < 2 else i)["token_ids"]
            for i, t in enumerate([1.0, 1.0, 1.0, 0.7])
        ]
        handler = sampler._handler
        assert handler is not None
        hook = handler.engine.model.register_forward_pre_hook(
            lambda module, args, kwargs: computed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        scored = sampler.rescore()
        hook.remove()
    assert answers[0] == answers[1], "the case of equal answers"
    distinct = {tuple(answer) for answer in answers}
    shared = len(prompt) + sum(len(answer) for answer in distinct)
    assert sum(computed) <= shared if attention == "ragged" else sum(computed) == sum(map(len, answers)) + 4 * 60
    assert sorted(tuple(s.token_ids) for s in scored) == sorted((*prompt, *answer) for answer in answers)
    for sequence in scored:
        plain = Reference(model).logprobs(prompt, sequence.token_ids[60:], sequence.temperature)
        assert torch.allclose(torch.tensor(sequence.recomputed), plain, atol=1e-4)


def test_large_sequence_has_every_nth_token_rescored(sampler, model, monkeypatch):
    reference = Reference(model)
    monkeypatch.setattr(rescoring, "_MAX_LOGITS", 6 * reference.model.config.vocab_size)
    prompt = random_prompt(20, seed=1)
    tokens = generate(sampler.url, prompt, ignore_eos=True)["token_ids"]
    (scored,) = sampler.rescore()
    assert scored.positions == [20, 23, 26, 29, 32, 35], "6 of 16"
    assert torch.allclose(torch.tensor(scored.recomputed), reference.logprobs(prompt, tokens)[::3], atol=1e-4)
    assert scored.recomputed == pytest.approx(scored.logprobs, abs=1e-4)


def sequence(length: int) -> SampledSequence:
    return SampledSequence("", 0, 1.0, [1] * length, [length - 1], [-1.0])


def test_selects_a_share_and_at_least_one():
    many = [sequence(100) for _ in range(800)]
    assert select_evenly(many) == many[::8]
    assert select_evenly(many[:10]) == many[:10], "few tokens cost little"
    assert select_evenly([sequence(90_000)] * 2) != []
    assert select_evenly([]) == []


def test_recent_samples_are_bounded(monkeypatch):
    monkeypatch.setattr(rescoring, "_MAX_KEPT_TOKENS", 100)
    recent = RecentSamples()
    for trial in range(10):
        for turn in range(3):
            prompt = list(range(trial * 100, trial * 100 + 10 * turn + 5))
            done = Completion(str(trial), "", len(prompt), tuple(range(prompt[-1] + 1, prompt[-1] + 6)), (-1.0,) * 5, 7)
            recent.add(prompt, SamplingParams(0), done)
    kept = recent.pop(7)
    assert [s.session_id for s in kept] == ["7", "8", "9"]
    assert [len(s.positions) for s in kept] == [15, 15, 15]
    assert recent.pop(7) == []


def test_each_sample_is_rescored_once_by_its_version(sampler, model):
    generate(sampler.url, random_prompt(20, seed=1))
    for version in (1, 2):
        sampler.load_adapter(random_adapter(model, seed=version), version, config=LORA)
    assert sampler.rescore() == [], "the version may be gone"
    generate(sampler.url, random_prompt(20, seed=1))
    sampler.load_adapter(random_adapter(model, seed=3), 3, config=LORA)
    generate(sampler.url, random_prompt(20, seed=1))
    scored = sampler.rescore()
    assert [s.version for s in scored] == [2, 3]
    assert all(s.recomputed == pytest.approx(s.logprobs, abs=1e-4) for s in scored)
    assert sampler.rescore() == []


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_greedy_and_truncated_samples_are_not_rescored(sampler, sampling):
    generate(sampler.url, random_prompt(20, seed=1), **sampling)
    assert sampler.rescore() == []


def test_rescoring_does_not_disturb_sampling(sampler):
    prompts = [random_prompt(30, seed=seed) for seed in range(8)]
    alone = [generate(sampler.url, prompt, seed=5)["token_ids"] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        during = [pool.submit(generate, sampler.url, prompt, seed=5) for prompt in prompts]
        for _ in range(5):
            sampler.rescore()
        assert [request.result()["token_ids"] for request in during] == alone


def test_bfloat16_difference_is_small_noise(model):
    with Sampler(model, dtype="bfloat16", seed=3) as sampler:
        for seed in range(8):
            generate(sampler.url, random_prompt(20, seed=seed), max_tokens=32)
        scored = sampler.rescore()
    difference = torch.tensor([b - a for s in scored for a, b in zip(s.logprobs, s.recomputed, strict=True)])
    assert 1e-4 < difference.square().mean().sqrt() < 0.1
