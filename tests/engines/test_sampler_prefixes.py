"""Prefix sharing, measured in tokens of the model's forward passes."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import pytest
from sampler_setup import LORA, Reference, agrees, generate, http, random_adapter, random_prompt

from harbortrainer.engines import memory_parts
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.continuous_batching import SeededRunner

PAGE = 16


@pytest.fixture
def forwards(monkeypatch):
    """Tokens of each forward pass, by request."""
    passes: list[list[int]] = []
    compute_batch = SeededRunner.compute_batch

    def record_pass(self, model, batch_data):
        ends = batch_data["cu_seq_lens_q"].tolist()
        passes.append([end - begin for begin, end in pairwise(ends)])
        return compute_batch(self, model, batch_data)

    monkeypatch.setattr(SeededRunner, "compute_batch", record_pass)
    return passes


@pytest.fixture
def sampler(folder, forwards):
    with Sampler(folder, seed=3, max_model_len=2048) as running:
        forwards.clear()  # without the self-check
        yield running


def request_answers(url: str, prompt: Sequence[int], count: int = 1, **sampling) -> list[dict]:
    """Request several answers to one prompt at the same time."""
    sampling = {"max_tokens": 20, "ignore_eos": True, "n": count, **sampling}
    body = {"token_ids": list(prompt), "sampling_params": sampling}
    reply = http.post(f"{url}/inference/v1/generate", json=body, timeout=60)
    reply.raise_for_status()
    return reply.json()["choices"]


def prompt_tokens(forwards: list[list[int]], answers: int = 1, new: int = 20) -> int:
    """Return the computed prompt tokens: all tokens without those of answers, whose last token is never an input."""
    total = sum(map(sum, forwards)) - answers * (new - 1)
    forwards.clear()
    return total


def test_turn_computes_new_tokens_only(sampler, forwards, reference):
    prompt, cached = random_prompt(1000, seed=1), 0
    for turn in range(4):
        choice = generate(sampler.url, prompt, session="trial", max_tokens=20, ignore_eos=True)
        assert prompt_tokens(forwards) <= len(prompt) - cached + PAGE
        assert agrees(choice, reference, prompt)
        cached = len(prompt) + len(choice["token_ids"])
        prompt = [*prompt, *choice["token_ids"], *random_prompt(30 + turn, seed=turn)]


def test_group_computes_its_prompt_once(sampler, forwards, reference):
    prompt = random_prompt(1000, seed=2)
    choices = request_answers(sampler.url, prompt, 8)
    assert prompt_tokens(forwards, 8) <= len(prompt) + 7 * PAGE
    assert all(agrees(choice, reference, prompt) for choice in choices)
    request_answers(sampler.url, prompt)
    assert prompt_tokens(forwards) <= PAGE, "a later trial of the group"


def test_groups_compute_shared_prefix_once_and_the_rest_in_parallel(sampler, forwards, reference):
    shared = random_prompt(320, seed=3)
    prompts = [[*shared, *random_prompt(160, seed=i)] for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        with sampler._handler.engine._manager.pause():
            requests = [pool.submit(request_answers, sampler.url, prompt, 4) for prompt in prompts]
            while sampler.stats()["running"] < 16:
                pass
        choices = [future.result(timeout=60) for future in requests]
    for prompt, group_choices in zip(prompts, choices, strict=True):
        assert all(agrees(choice, reference, prompt) for choice in group_choices)
    assert prompt_tokens(forwards, 16) <= len(shared) + 4 * (160 + PAGE) + 12 * PAGE


def test_new_version_recomputes_conversation(folder, sampler, forwards):
    adapters = {version: random_adapter(folder, seed=version) for version in (1, 2)}
    prompt = random_prompt(400, seed=5)
    for version in (1, 2):
        sampler.load_adapter(adapters[version], version, config=LORA)
        choice = generate(sampler.url, prompt, session="trial", max_tokens=20, ignore_eos=True)
        assert prompt_tokens(forwards) == len(prompt)
        assert agrees(choice, Reference(folder, adapters[version]), prompt)
        prompt = [*prompt, *choice["token_ids"], *random_prompt(30, seed=version)]


def test_evicts_least_recently_used_blocks_when_needed(folder, forwards, reference, monkeypatch):
    monkeypatch.setattr(memory_parts, "_CPU_CACHE_BYTES", 0)
    with Sampler(folder, seed=3, max_model_len=256) as small:
        forwards.clear()
        size = small.stats()["cache_tokens"]
        kept, others = random_prompt(160, seed=0), [random_prompt(160, seed=i) for i in range(1, 13)]
        assert len(others) * 160 > size > 4 * 160
        for number, other in enumerate(others):
            choice = request_answers(small.url, kept)[0]
            assert prompt_tokens(forwards) == (len(kept) if number == 0 else PAGE)
            assert agrees(choice, reference, kept)
            request_answers(small.url, other)
            assert prompt_tokens(forwards) == len(other)
        request_answers(small.url, others[-2])
        assert prompt_tokens(forwards) == PAGE
        request_answers(small.url, [*others[5][:144], *random_prompt(16, seed=99)])
        assert PAGE < prompt_tokens(forwards) <= 160
        request_answers(small.url, others[0])
        assert prompt_tokens(forwards) == len(others[0])


def test_prompt_sharing_lets_more_requests_decode_together(folder, forwards, reference, monkeypatch):
    monkeypatch.setattr(memory_parts, "_CPU_CACHE_BYTES", 0)  # four requests of the longest length
    prompt = random_prompt(400, seed=1)
    with Sampler(folder, seed=3, max_model_len=448) as sampler:
        forwards.clear()
        choices = request_answers(sampler.url, prompt, count=12)
    assert max(map(len, forwards)) == 12
    # One request computes the prompt and the others its last tokens in one pass; then each decodes one token per pass.
    assert forwards.count([1] * 12) >= 18
    assert all(agrees(choice, reference, prompt) for choice in choices)


def test_waiting_request_computes_prompt_after_cancellation(sampler, forwards, monkeypatch):
    manager = sampler._handler.engine._manager
    recording, cancelled = SeededRunner.compute_batch, []

    def cancel_the_first(self, model, batch_data):
        if not cancelled:
            cancelled.extend(manager.batch_processor.scheduler.active_requests)
            manager.cancel_request(cancelled[0])
        return recording(self, model, batch_data)

    monkeypatch.setattr(SeededRunner, "compute_batch", cancel_the_first)
    prompt = random_prompt(1000, seed=6)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(request_answers, sampler.url, prompt, 2)
        while not sampler.completion_log.peek(""):
            assert not request.done()
        sampler.stop()
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            request.result(timeout=60)
    (completion,) = sampler.completion_log.pop("")
    assert len(completion.token_ids) == 20 and [completion.request_id] != cancelled
    # The first request's first pass is reused.
    assert prompt_tokens(forwards) == len(prompt)
