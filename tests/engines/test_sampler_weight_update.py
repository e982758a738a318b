"""Adapter updates: each request keeps one policy version with its own weights, and no request waits."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from sampler_setup import LORA, PROMPT, agrees, generate, http, random_prompt, sample_across_updates

from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.continuous_batching import SeededRunner
from harbortrainer.engines.local.sampler.sampled_model import AdapterError
from harbortrainer.engines.local.sampler.sharing_scheduler import SharingScheduler


@pytest.fixture
def sampler(folder):
    with Sampler(folder, model_name="policy", max_model_len=512) as running:
        yield running


def test_each_version_samples_from_its_own_weights(sampler, adapters, references):
    for version in (0, 1, 2, 1):
        if version or sampler.version:
            seconds = sampler.load_adapter(adapters[version], version, config=LORA)
            assert seconds > 0
        assert sampler.version == version
        choice = generate(sampler.url, PROMPT, session="s", ignore_eos=True)
        assert agrees(choice, references[version])
        assert not any(agrees(choice, references[v]) for v in references if v != version)
        assert sampler.completion_log.pop("s")[0].version == version


def test_prefix_cache_ends_with_its_version(sampler, adapters, references):
    prompt = random_prompt(200, seed=3)
    generate(sampler.url, prompt)
    sampler.load_adapter(adapters[1], 1, config=LORA)
    assert agrees(generate(sampler.url, prompt, ignore_eos=True), references[1], prompt)


def test_update_waits_for_one_pass_and_requests_keep_their_version(sampler, adapters, references, monkeypatch):
    """The adapters have different log-probabilities, so a token of the wrong version would be detected."""
    passes: list[int] = []
    at_pause, at_update = [], []  # passes so far
    compute_batch, set_newest = SeededRunner.compute_batch, SharingScheduler.set_newest
    manager = sampler._handler.engine._manager
    pause = manager.pause

    def record_version(self, model, batch_data):
        passes.append(self.scheduler.active_policy.version)
        return compute_batch(self, model, batch_data)

    monkeypatch.setattr(SeededRunner, "compute_batch", record_version)
    monkeypatch.setattr(manager, "pause", lambda: (at_pause.append(len(passes)), pause())[1])
    monkeypatch.setattr(
        SharingScheduler, "set_newest", lambda *args: (at_update.append(len(passes)), set_newest(*args))[1]
    )
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
            assert not any(old.done() for old in running), "the new request ends first"
            assert agrees(new, references[version])
            assert sampler.completion_log.pop(f"new-{version}")[0].version == version
        for version, old in enumerate(running):
            assert agrees(old.result(timeout=60), references[version])
            assert sampler.completion_log.pop(f"old-{version}")[0].version == version
    # The running pass is already counted; another one may start before the engine pauses.
    assert all(end - begin <= 1 for begin, end in zip(at_pause, at_update, strict=True))
    after_update = passes[passes.index(2) :][: 2 * 16]
    assert abs(after_update.count(2) - after_update.count(1)) <= 16, "both versions run in turn"


def test_older_version_does_not_use_prefix_cache(sampler, adapters, references):
    manager = sampler._handler.engine._manager
    prompt = random_prompt(200, seed=3)
    with ThreadPoolExecutor(2) as pool:
        old = pool.submit(generate, sampler.url, prompt, max_tokens=250, ignore_eos=True)
        while manager.cache_tokens()[0] < 220:
            assert not old.done()
        sampler.load_adapter(adapters[1], 1, config=LORA)
        same, extended = (generate(sampler.url, p, ignore_eos=True) for p in (prompt, prompt + [7] * 40))
        answer = old.result(timeout=60)
        conversation = [*prompt, *answer["token_ids"]]
        after = generate(sampler.url, conversation, ignore_eos=True)
    assert agrees(answer, references[0], prompt)
    assert agrees(same, references[1], prompt) and agrees(extended, references[1], prompt + [7] * 40)
    assert agrees(after, references[1], conversation)


def test_unused_adapter_is_reused(sampler, adapters, references):
    for version in (1, 2, 1, 2, 1):
        sampler.load_adapter(adapters[version], version, config=LORA)
        assert agrees(generate(sampler.url, PROMPT, ignore_eos=True), references[version])
    assert len(sampler._adapters._weights) == 2


def test_request_across_update_is_rescored_by_its_version(sampler, adapters):
    with ThreadPoolExecutor(1) as pool:
        sampler.load_adapter(adapters[1], 1, config=LORA)
        old = pool.submit(generate, sampler.url, PROMPT, session="old", max_tokens=200, ignore_eos=True)
        while not sampler.stats()["running"]:
            assert not old.done()
        sampler.load_adapter(adapters[2], 2, config=LORA)
        generate(sampler.url, PROMPT, session="new", ignore_eos=True)
        old.result(timeout=60)
    scored = sampler.rescore()
    assert [(s.version, len(s.positions), s.crossed_update) for s in scored] == [(1, 200, True), (2, 16, False)]
    for sequence in scored:
        assert sequence.recomputed == pytest.approx(sequence.logprobs, abs=1e-5)


def test_completions_match_their_version_across_updates(sampler, adapters, references):
    choices = sample_across_updates(sampler, lambda v: sampler.load_adapter(adapters[v], v, config=LORA))
    assert all(agrees(choice, references[version]) for version, choice in choices)


def test_cancelled_request_does_not_delay_update(sampler, adapters):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 400, "ignore_eos": True, "n": 16}}
    with pytest.raises(httpx.ReadTimeout):
        http.post(sampler.url + "/inference/v1/generate", json=body, timeout=httpx.Timeout(5, read=0.05))
    sampler.load_adapter(adapters[1], 1, config=LORA)
    assert generate(sampler.url, PROMPT)["token_ids"]


def test_refused_adapter_changes_nothing(sampler, adapters, references):
    wrong = {key: tensor[:, :2] for key, tensor in adapters[1].items()}
    with pytest.raises(AdapterError, match="not"):
        sampler.load_adapter(wrong, 1, config=LORA)
    with pytest.raises(AdapterError, match="differ"):
        sampler.load_adapter({"base_model.model.nothing.lora_A.weight": torch.zeros(1)}, 1, config=LORA)
    assert sampler.version == 0
    assert agrees(generate(sampler.url, PROMPT, ignore_eos=True), references[0])
