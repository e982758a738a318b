"""What requests have in common is computed once: counted in the tokens that go through the model."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import pytest
from sampler_setup import LORA, Reference, agrees, generate, random_adapter, random_prompt
from tiny_model import build_tiny_model

from harbortrainer.engines import cache_size
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.continuous_batching import SeededRunner

PAGE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def forwards(monkeypatch):
    """Each forward's tokens, request by request."""
    seen: list[list[int]] = []
    plain = SeededRunner.compute_batch

    def watch(self, model, batch_data):
        ends = batch_data["cu_seq_lens_q"].tolist()
        seen.append([end - begin for begin, end in pairwise(ends)])
        return plain(self, model, batch_data)

    monkeypatch.setattr(SeededRunner, "compute_batch", watch)
    return seen


@pytest.fixture
def sampler(folder, forwards):
    with Sampler(folder, seed=3, max_model_len=2048) as running:
        forwards.clear()  # its start tries the model
        yield running


def ask(url: str, prompt: Sequence[int], count: int = 1, **sampling) -> list[dict]:
    """Some answers to one prompt, asked for at the same moment."""
    sampling = {"max_tokens": 20, "ignore_eos": True, "n": count, **sampling}
    body = {"token_ids": list(prompt), "sampling_params": sampling}
    reply = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=60)
    reply.raise_for_status()
    return reply.json()["choices"]


def prompt_tokens(forwards: list[list[int]], answers: int = 1, new: int = 20) -> int:
    """Tokens of prompts that were computed: all but the answers, whose last token nobody reads."""
    total = sum(map(sum, forwards)) - answers * (new - 1)
    forwards.clear()
    return total


def test_a_turn_computes_what_is_new_in_it(sampler, forwards, reference):
    prompt, known = random_prompt(1000, seed=1), 0
    for turn in range(4):
        choice = generate(sampler.url, prompt, session="trial", max_tokens=20, ignore_eos=True)
        assert prompt_tokens(forwards) <= len(prompt) - known + PAGE
        assert agrees(choice, reference, prompt)
        known = len(prompt) + len(choice["token_ids"])
        prompt = [*prompt, *choice["token_ids"], *random_prompt(30 + turn, seed=turn)]


def test_a_group_that_comes_together_computes_its_prompt_once(sampler, forwards, reference):
    prompt = random_prompt(1000, seed=2)
    choices = ask(sampler.url, prompt, 8)
    assert prompt_tokens(forwards, 8) <= len(prompt) + 7 * PAGE
    assert all(agrees(choice, reference, prompt) for choice in choices)
    ask(sampler.url, prompt)
    assert prompt_tokens(forwards) <= PAGE, "a trial of the group that comes later"


def test_groups_that_come_together_compute_what_they_share_once_and_the_rest_beside_each_other(
    sampler, forwards, reference
):
    shared = random_prompt(320, seed=3)
    prompts = [[*shared, *random_prompt(160, seed=i)] for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        with sampler._replies.engine._manager.pause():
            asked = [pool.submit(ask, sampler.url, prompt, 4) for prompt in prompts]
            while sampler.stats()["running"] < 16:
                pass
        choices = [future.result(timeout=60) for future in asked]
    for prompt, of_group in zip(prompts, choices, strict=True):
        assert all(agrees(choice, reference, prompt) for choice in of_group)
    assert prompt_tokens(forwards, 16) <= len(shared) + 4 * (160 + PAGE) + 12 * PAGE


def test_a_new_version_computes_the_whole_conversation(folder, sampler, forwards):
    adapters = {version: random_adapter(folder, seed=version) for version in (1, 2)}
    prompt = random_prompt(400, seed=5)
    for version in (1, 2):
        sampler.load_adapter(adapters[version], version, config=LORA)
        choice = generate(sampler.url, prompt, session="trial", max_tokens=20, ignore_eos=True)
        assert prompt_tokens(forwards) == len(prompt)
        assert agrees(choice, Reference(folder, adapters[version]), prompt)
        prompt = [*prompt, *choice["token_ids"], *random_prompt(30, seed=version)]


def test_what_was_used_longest_ago_is_given_up_first_and_only_for_room(folder, forwards, reference, monkeypatch):
    monkeypatch.setattr(cache_size, "_CPU_CACHE_BYTES", 0)
    with Sampler(folder, seed=3, max_model_len=256) as small:
        forwards.clear()
        size = small.stats()["cache_tokens"]
        used, others = random_prompt(160, seed=0), [random_prompt(160, seed=i) for i in range(1, 13)]
        assert len(others) * 160 > size > 4 * 160
        for number, other in enumerate(others):
            choice = ask(small.url, used)[0]
            assert prompt_tokens(forwards) == (len(used) if number == 0 else PAGE)
            assert agrees(choice, reference, used)
            ask(small.url, other)
            assert prompt_tokens(forwards) == len(other)
        ask(small.url, others[-2])
        assert prompt_tokens(forwards) == PAGE
        ask(small.url, [*others[5][:144], *random_prompt(16, seed=99)])
        assert PAGE < prompt_tokens(forwards) <= 160
        ask(small.url, others[0])
        assert prompt_tokens(forwards) == len(others[0])


def test_those_who_share_a_prompt_decode_together_in_a_cache_that_would_hold_few_of_them_apart(
    folder, forwards, reference, monkeypatch
):
    monkeypatch.setattr(cache_size, "_CPU_CACHE_BYTES", 0)  # four requests of the longest length
    prompt = random_prompt(400, seed=1)
    with Sampler(folder, seed=3, max_model_len=448) as sampler:
        forwards.clear()
        choices = ask(sampler.url, prompt, count=12)
    assert max(map(len, forwards)) == 12
    # One computes the prompt, and the others its end, in a pass; from then on all of them a token each.
    assert forwards.count([1] * 12) >= 18
    assert all(agrees(choice, reference, prompt) for choice in choices)


def test_a_request_that_waits_for_one_that_is_cancelled_computes_the_prompt_itself(sampler, forwards, monkeypatch):
    manager = sampler._replies.engine._manager
    watching, cancelled = SeededRunner.compute_batch, []

    def cancel_the_first(self, model, batch_data):
        if not cancelled:
            cancelled.extend(manager.batch_processor.scheduler.active_requests)
            manager.cancel_request(cancelled[0])
        return watching(self, model, batch_data)

    monkeypatch.setattr(SeededRunner, "compute_batch", cancel_the_first)
    prompt = random_prompt(1000, seed=6)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, sampler.url, prompt, 2)
        while not sampler.ledger.peek(""):
            assert not asked.done()
        sampler.stop()
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            asked.result(timeout=60)
    (completion,) = sampler.ledger.take("")
    assert len(completion.token_ids) == 20 and [completion.request_id] != cancelled
    # The first one's first pass was not for nothing.
    assert prompt_tokens(forwards) == len(prompt)
