"""Sampling with `generate`, for models that continuous batching cannot sample: exact, also in padded batches."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
from model_kinds import small_model
from patience import HANG_S, wait_until
from sampler_setup import LORA, PROMPT, Reference, agrees, generate, http, random_prompt, sample_across_updates
from transformers import AutoModelForCausalLM, GenerationConfig

from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.engines.local.sampler import Sampler, sampled_model, sampling_engine
from harbortrainer.engines.local.sampler.plain_batching import PlainManager
from harbortrainer.engines.local.sampler.sampling_params import unit_interval
from harbortrainer.engines.memory_count import plan_memory
from harbortrainer.engines.memory_parts import CacheBytes, PlainLimits, PromptBytes, measure_plain_cache
from harbortrainer.errors import UserError

RAGGED = [random_prompt(length, seed=length) for length in (5, 11, 30, 70, 64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("qwen3_5"), "qwen3_5")


@pytest.fixture
def sampler(folder):
    with Sampler(folder, max_model_len=512) as running:
        yield running


def manager_of(sampler: Sampler) -> PlainManager:
    assert sampler._handler is not None
    manager = sampler._handler.engine._manager
    assert isinstance(manager, PlainManager)
    return manager


@contextmanager
def recorded_batches(monkeypatch):
    sizes: list[int] = []
    real = PlainManager._generate

    def record(self, running):
        sizes.append(len(running))
        return real(self, running)

    monkeypatch.setattr(PlainManager, "_generate", record)
    yield sizes


def sample_together(sampler: Sampler, prompts, **sampling) -> list[dict]:
    """Send requests that wait for the same batch, and return their choices."""
    manager = manager_of(sampler)
    with ThreadPoolExecutor(len(prompts)) as pool:
        with manager.pause():
            sent = [
                pool.submit(generate, sampler.url, prompt, max_tokens=10 + 5 * number, **sampling)
                for number, prompt in enumerate(prompts)
            ]
            wait_until(lambda: len(manager._waiting) == len(prompts))
        return [one.result(timeout=HANG_S) for one in sent]


@pytest.mark.parametrize("kind", ["qwen3_5", "gpt_oss", "nemotron_h", "gemma2"])
def test_padding_does_not_change_logprobs(tmp_path, kind, monkeypatch):
    folder = small_model(tmp_path, kind)
    plain = Reference(folder)
    with Sampler(folder, max_model_len=256) as sampler, recorded_batches(monkeypatch) as sizes:
        choices = sample_together(sampler, RAGGED, ignore_eos=True)
    assert sizes == [5]
    assert [len(choice["token_ids"]) for choice in choices] == [10, 15, 20, 25, 30]
    assert all(agrees(choice, plain, prompt) for choice, prompt in zip(choices, RAGGED, strict=True))


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}]
)
def test_draws_same_tokens_as_continuous_batching(tmp_path, monkeypatch, sampling):
    folder = small_model(tmp_path, "llama")
    answers = []
    for reason in ("", "compared with continuous batching"):
        monkeypatch.setattr(sampling_engine, "needs_plain_sampling", lambda config, reason=reason: reason)
        monkeypatch.setattr(sampled_model, "needs_plain_sampling", lambda config, reason=reason: reason)
        with Sampler(folder, max_model_len=256, seed=3) as sampler:
            sent = [generate(sampler.url, prompt, session=str(len(prompt)), **sampling) for prompt in RAGGED]
        answers.append([choice["token_ids"] for choice in sent])
    assert answers[0] == answers[1]


def test_stop_token_ends_a_request_and_belongs_to_it(sampler):
    whole = generate(sampler.url, PROMPT, max_tokens=20, ignore_eos=True, seed=1)["token_ids"]
    stopped = generate(sampler.url, PROMPT, max_tokens=20, ignore_eos=True, seed=1, stop_token_ids=[whole[4]])
    assert stopped["token_ids"] == whole[: whole.index(whole[4]) + 1]
    assert stopped["finish_reason"] == "stop"


def test_ignores_defaults_of_the_models_own_generation_config(tmp_path):
    folder = small_model(tmp_path, "qwen3_5")
    GenerationConfig(repetition_penalty=5.0, temperature=0.3, do_sample=True, min_new_tokens=9).save_pretrained(folder)
    with Sampler(folder, max_model_len=256) as sampler:
        assert agrees(generate(sampler.url, PROMPT, max_tokens=20, ignore_eos=True), Reference(folder))


def test_completions_match_their_version_across_updates(sampler, adapters, references):
    def load(version: int) -> None:
        sampler.load_adapter(adapters[version], version, config=LORA)
        finished = sampler.stats()["requests"]
        wait_until(lambda: sampler.stats()["requests"] > finished + 12)

    choices = sample_across_updates(sampler, load)
    assert {version for version, _ in choices} >= {1, 2}
    assert all(agrees(choice, references[version]) for version, choice in choices)


def test_update_waits_for_one_forward_pass_of_a_running_batch(sampler, adapters, references):
    manager = manager_of(sampler)
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(generate, sampler.url, PROMPT, session="old", max_tokens=400, ignore_eos=True)
        wait_until(lambda: manager.cache_tokens()[0] > len(PROMPT) + 5)
        sampler.load_adapter(adapters[1], 1, config=LORA)
        assert not old.done()
        answer = old.result(timeout=HANG_S)
    assert agrees(answer, references[0])
    assert agrees(generate(sampler.url, PROMPT, ignore_eos=True), references[1])


def test_requests_of_two_versions_are_not_in_one_batch(sampler, adapters, references, monkeypatch):
    manager = manager_of(sampler)
    with ThreadPoolExecutor(3) as pool, recorded_batches(monkeypatch) as sizes:
        busy = pool.submit(generate, sampler.url, PROMPT, max_tokens=200, ignore_eos=True)
        wait_until(lambda: manager.cache_tokens()[0] > len(PROMPT))
        old = pool.submit(generate, sampler.url, PROMPT, ignore_eos=True)
        wait_until(lambda: len(manager._waiting) == 1)
        sampler.load_adapter(adapters[1], 1, config=LORA)
        new = pool.submit(generate, sampler.url, PROMPT, ignore_eos=True)
        wait_until(lambda: len(manager._waiting) == 2)
        busy.result(timeout=HANG_S)
        assert agrees(old.result(timeout=HANG_S), references[0])
        assert agrees(new.result(timeout=HANG_S), references[1])
    assert sizes == [1, 1, 1]


def test_whole_weights_are_replaced_once_requests_have_ended(folder, sampler):
    changed = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1.01)
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(generate, sampler.url, PROMPT, max_tokens=100, ignore_eos=True)
        wait_until(lambda: sampler.stats()["running"] == 1)
        sampler.load_weights(dict(changed.named_parameters()), 1)
        assert agrees(old.result(timeout=HANG_S), Reference(folder))
    reference = Reference(folder)
    reference.model = changed.eval()
    assert agrees(generate(sampler.url, PROMPT, ignore_eos=True), reference)


def test_recomputed_logprobs_of_separate_sequences_agree(sampler):
    for number, prompt in enumerate(RAGGED):
        generate(sampler.url, prompt, session=str(number), ignore_eos=True)
    scored = sampler.rescore()
    assert len(scored) == len(RAGGED)
    for sequence in scored:
        assert sequence.recomputed == pytest.approx(sequence.logprobs, abs=1e-5)


def test_cancelled_requests_free_the_batch(sampler):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 400, "ignore_eos": True, "n": 4}}
    with pytest.raises(httpx.ReadTimeout):
        http.post(sampler.url + "/inference/v1/generate", json=body, timeout=httpx.Timeout(5, read=0.1))
    wait_until(lambda: not manager_of(sampler).busy)
    assert sampler.stats()["cancelled"] == 4
    assert generate(sampler.url, PROMPT)["token_ids"]


def test_failed_forward_pass_fails_running_and_new_requests(folder, monkeypatch):
    with Sampler(folder, max_model_len=256) as sampler:
        monkeypatch.setattr(sampler._model, "generate", lambda *args, **kwargs: 1 / 0)
        for _ in range(2):
            with pytest.raises(httpx.HTTPStatusError, match="500"):
                generate(sampler.url, PROMPT)
        assert http.get(sampler.url + "/health").status_code == 503


def test_stop_fails_running_requests(folder):
    sampler = Sampler(folder, max_model_len=512).start()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, sampler.url, PROMPT, max_tokens=460, ignore_eos=True)
        wait_until(lambda: sampler.stats()["running"] == 1)
        sampler.stop()
        with pytest.raises(httpx.HTTPError):
            running.result(timeout=HANG_S)
    assert not any(thread.name == "sampler" for thread in threading.enumerate())


def test_batch_without_memory_is_sampled_in_halves(folder, monkeypatch):
    plain = Reference(folder)
    with Sampler(folder, max_model_len=256) as sampler, recorded_batches(monkeypatch) as sizes:
        real: Any = sampler._model.generate

        def two_at_once(ids, **kwargs):
            if len(ids) > 2:
                raise torch.OutOfMemoryError("no memory")
            return real(ids, **kwargs)

        monkeypatch.setattr(sampler._model, "generate", two_at_once)
        choices = sample_together(sampler, RAGGED, ignore_eos=True)
    assert sizes == [5, 2, 3, 1, 2]
    assert all(agrees(choice, plain, prompt) for choice, prompt in zip(choices, RAGGED, strict=True))


def test_halves_are_sampled_without_the_cache_of_the_failed_batch(folder, monkeypatch):
    with Sampler(folder, max_model_len=256) as sampler:
        real: Any = sampler._model.forward
        caches: list[weakref.ref] = []
        alive: list[int] = []

        def fails_late(*args, **kwargs):
            output = real(*args, **kwargs)
            if len(kwargs["input_ids"]) == 4 and kwargs["input_ids"].shape[1] == 1:
                caches.append(weakref.ref(output.past_key_values))
                raise torch.OutOfMemoryError("no memory")
            gc.collect()
            alive.append(sum(cache() is not None for cache in caches))
            return output

        monkeypatch.setattr(sampler._model, "forward", fails_late)
        assert len(sample_together(sampler, RAGGED[:4], ignore_eos=True)) == 4
    assert len(caches) == 1
    assert set(alive) == {0}


def test_request_is_answered_before_its_batch_ends(sampler):
    manager = manager_of(sampler)
    with ThreadPoolExecutor(2) as pool:
        with manager.pause():
            long = pool.submit(generate, sampler.url, PROMPT, max_tokens=400, ignore_eos=True)
            short = pool.submit(generate, sampler.url, PROMPT, max_tokens=2, ignore_eos=True, seed=5)
            wait_until(lambda: len(manager._waiting) == 2)
        assert len(short.result(timeout=HANG_S)["token_ids"]) == 2
        assert not long.done()
        assert len(long.result(timeout=HANG_S)["token_ids"]) == 400


def test_no_row_passes_the_context_of_the_model(tmp_path, monkeypatch):
    """gpt_neo has a table of positions, and `generate` feeds tokens to the ended request too."""
    folder = small_model(tmp_path, "gpt_neo")
    long, short = random_prompt(250, seed=1), random_prompt(10, seed=2)
    with Sampler(folder, max_model_len=256) as sampler, recorded_batches(monkeypatch) as sizes:
        manager = manager_of(sampler)
        with ThreadPoolExecutor(2) as pool:
            with manager.pause():
                sent = [
                    pool.submit(generate, sampler.url, prompt, max_tokens=tokens, ignore_eos=True)
                    for prompt, tokens in ((long, 3), (short, 60))
                ]
                wait_until(lambda: len(manager._waiting) == 2)
            choices = [one.result(timeout=HANG_S) for one in sent]
    assert sizes == [2, 1]
    assert [len(choice["token_ids"]) for choice in choices] == [3, 60]
    plain = Reference(folder)
    assert all(agrees(choice, plain, prompt) for choice, prompt in zip(choices, (long, short), strict=True))


def test_model_that_ignores_padding_is_refused(tmp_path):
    with pytest.raises(UserError, match="give different log-probabilities"):
        Sampler(small_model(tmp_path, "rwkv"), max_model_len=256).start()


def test_experts_are_not_copied_for_decoding(tmp_path, monkeypatch):
    with Sampler(small_model(tmp_path, "qwen3_5_moe"), max_model_len=256) as sampler:
        model: Any = sampler._model
        monkeypatch.setattr(type(model), "device", torch.device("cuda"))
        with model._optimize_model_for_decode():
            assert set(model.get_experts_implementation().values()) <= {"grouped_mm", None}
        with type(model)._optimize_model_for_decode(model):
            assert "batched_mm" in model.get_experts_implementation().values()


def test_random_numbers_are_below_one_in_float32():
    largest, least = unit_interval(2**64 - 1), unit_interval(0)
    assert 0 < torch.tensor(least).item() < torch.tensor(largest).item() < 1


def test_request_without_memory_fails_alone(folder, monkeypatch):
    with Sampler(folder, max_model_len=256) as sampler:
        real: Any = sampler._model.generate

        def short_only(ids, **kwargs):
            if ids.shape[1] > 50:
                raise torch.OutOfMemoryError("no memory")
            return real(ids, **kwargs)

        monkeypatch.setattr(sampler._model, "generate", short_only)
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            generate(sampler.url, RAGGED[3])
        assert generate(sampler.url, RAGGED[0])["token_ids"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_cache_is_counted_as_it_is_measured(folder, kind):
    """Four layers, one with attention: 2 heads of 16, keys and values, 4 bytes each."""
    measured = measure_plain_cache(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    planned = plan_memory(folder, LoraSettings(rank=4), device_type=kind, capacity=2**33, dtype="float32")
    assert planned.cache_bytes == measured
    assert measured.per_token == 2 * 2 * 16 * 4
    state, convolution = 4 * 16 * 16 * 4, (2 * 2 * 16 + 4 * 16) * 4 * 4
    assert measured.per_request == 3 * (state + convolution)


def test_request_shares_its_state_among_its_tokens():
    assert CacheBytes(per_token=10, per_request=100).token(30) == 14
    assert CacheBytes.from_sizes({10: 150, 20: 250}) == CacheBytes(per_token=10, per_request=50)
    assert CacheBytes.from_sizes({10: 100, 20: 200}) == CacheBytes(per_token=10, per_request=0)


@pytest.mark.parametrize(
    ("batch", "fits"),
    [
        ((4, 10, 20), True),  # 4 * (50 + 20 * 10) = 1000 bytes
        ((5, 8, 20), False),  # 1250 bytes
        ((4, 11, 20), False),  # prompts of 4 * 11 * (3 + 11) bytes
        ((1, 500, 900), True),
    ],
)
def test_limits_of_a_batch(batch, fits):
    cache = CacheBytes(per_token=10, per_request=50)
    prompt = PromptBytes(moments=((9, 0), (3, 1)), per_cached_token=0)
    assert PlainLimits(cache=cache, cache_bytes=1000, prompt=prompt, prompt_bytes=600).fits(*batch) is fits
