"""Handing over adapters: one request is one policy version, what each samples is its own, and nobody waits."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from sampler_setup import LORA, PROMPT, agrees, generate, random_prompt, sampled_under_handovers
from tiny_model import build_tiny_model

from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.continuous_batching import SeededRunner
from harbortrainer.engines.local.sampler.sampled_model import AdapterError
from harbortrainer.engines.local.sampler.sharing_scheduler import SharingScheduler


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def sampler(folder):
    with Sampler(folder, model_name="policy", max_model_len=512) as running:
        yield running


def test_each_version_samples_from_its_own_weights(sampler, adapters, references):
    for version in (0, 1, 2, 1):
        if version or sampler.version:
            seconds = sampler.load_adapter(adapters[version], version, config=LORA)
            assert 0 < seconds < 5
        assert sampler.version == version
        choice = generate(sampler.url, PROMPT, session="s", ignore_eos=True)
        assert agrees(choice, references[version])
        assert not any(agrees(choice, references[v]) for v in references if v != version)
        assert sampler.ledger.take("s")[0].version == version


def test_the_prefix_cache_does_not_outlive_its_version(sampler, adapters, references):
    prompt = random_prompt(200, seed=3)
    generate(sampler.url, prompt)
    sampler.load_adapter(adapters[1], 1, config=LORA)
    assert agrees(generate(sampler.url, prompt, ignore_eos=True), references[1], prompt)


def test_a_handover_waits_for_one_forward_pass_and_a_running_request_goes_on_by_its_own_version(
    sampler, adapters, references, monkeypatch
):
    """Adapters that differ give other log-probabilities, so that a token of the wrong one would show."""
    passes: list[int] = []
    asked, begun = [], []
    plain, begin = SeededRunner.compute_batch, SharingScheduler.begin
    manager = sampler._replies.engine._manager
    pause = manager.pause

    def count(self, model, batch_data):
        passes.append(self.scheduler.turn.version)
        return plain(self, model, batch_data)

    monkeypatch.setattr(SeededRunner, "compute_batch", count)
    monkeypatch.setattr(manager, "pause", lambda: (asked.append(len(passes)), pause())[1])
    monkeypatch.setattr(SharingScheduler, "begin", lambda *args: (begun.append(len(passes)), begin(*args))[1])
    with ThreadPoolExecutor(8) as pool:
        running = []
        for version in (1, 2):
            before = version - 1
            running.append(
                pool.submit(generate, sampler.url, PROMPT, session=f"old-{before}", max_tokens=300, ignore_eos=True)
            )
            while passes.count(before) < 20:
                assert not running[-1].done()
            sampler.load_adapter(adapters[version], version, config=LORA)
            new = generate(sampler.url, PROMPT, session=f"new-{version}", ignore_eos=True)
            assert not any(old.done() for old in running), "a new request waits for no old one"
            assert agrees(new, references[version])
            assert sampler.ledger.take(f"new-{version}")[0].version == version
        for version, old in enumerate(running):
            assert agrees(old.result(timeout=60), references[version])
            assert sampler.ledger.take(f"old-{version}")[0].version == version
    # The one that had begun has been counted; another one may begin before the engine looks.
    assert all(until - since <= 1 for since, until in zip(asked, begun, strict=True))
    both = passes[passes.index(2) :]
    assert abs(both[: 2 * 16].count(2) - both[: 2 * 16].count(1)) <= 16, "they take turns"


def test_an_older_version_neither_takes_from_the_cache_nor_leaves_anything_there(sampler, adapters, references):
    manager = sampler._replies.engine._manager
    prompt = random_prompt(200, seed=3)
    with ThreadPoolExecutor(2) as pool:
        old = pool.submit(generate, sampler.url, prompt, max_tokens=250, ignore_eos=True)
        while manager.cache_tokens()[0] < 220:
            assert not old.done()
        sampler.load_adapter(adapters[1], 1, config=LORA)
        first, grown = (generate(sampler.url, p, ignore_eos=True) for p in (prompt, prompt + [7] * 40))
        answer = old.result(timeout=60)
        longer = [*prompt, *answer["token_ids"]]
        after = generate(sampler.url, longer, ignore_eos=True)
    assert agrees(answer, references[0], prompt)
    assert agrees(first, references[1], prompt) and agrees(grown, references[1], prompt + [7] * 40)
    assert agrees(after, references[1], longer)


def test_an_adapter_that_nobody_samples_with_is_used_again(sampler, adapters, references):
    for version in (1, 2, 1, 2, 1):
        sampler.load_adapter(adapters[version], version, config=LORA)
        assert agrees(generate(sampler.url, PROMPT, ignore_eos=True), references[version])
    assert len(sampler._adapters._weights) == 2


def test_what_ends_after_a_handover_is_scored_again_by_the_version_that_sampled_it(sampler, adapters):
    with ThreadPoolExecutor(1) as pool:
        sampler.load_adapter(adapters[1], 1, config=LORA)
        old = pool.submit(generate, sampler.url, PROMPT, session="old", max_tokens=200, ignore_eos=True)
        while not sampler.stats()["running"]:
            assert not old.done()
        sampler.load_adapter(adapters[2], 2, config=LORA)
        generate(sampler.url, PROMPT, session="new", ignore_eos=True)
        old.result(timeout=60)
    scored = sampler.score_again()
    assert [(s.version, len(s.positions), s.overtaken) for s in scored] == [(1, 200, True), (2, 16, False)]
    for sequence in scored:
        assert sequence.again == pytest.approx(sequence.logprobs, abs=1e-5)


def test_completions_under_many_handovers_belong_to_the_version_they_name(sampler, adapters, references):
    done = sampled_under_handovers(sampler, lambda v: sampler.load_adapter(adapters[v], v, config=LORA))
    assert all(agrees(choice, references[version]) for version, choice in done)


def test_a_cancelled_request_does_not_hold_up_a_handover(sampler, adapters):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 400, "ignore_eos": True, "n": 16}}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(sampler.url + "/inference/v1/generate", json=body, timeout=httpx.Timeout(5, read=0.05))
    sampler.load_adapter(adapters[1], 1, config=LORA)
    assert generate(sampler.url, PROMPT)["token_ids"]


def test_an_adapter_of_another_model_is_refused_and_changes_nothing(sampler, adapters, references):
    wrong = {key: tensor[:, :2] for key, tensor in adapters[1].items()}
    with pytest.raises(AdapterError, match="not"):
        sampler.load_adapter(wrong, 1, config=LORA)
    with pytest.raises(AdapterError, match="differ"):
        sampler.load_adapter({"base_model.model.nothing.lora_A.weight": torch.zeros(1)}, 1, config=LORA)
    assert sampler.version == 0
    assert agrees(generate(sampler.url, PROMPT, ignore_eos=True), references[0])
