"""Handing over weights: one request is one policy version, and what the new version samples is its own."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from sampler_setup import LORA, PROMPT, agrees, generate, random_prompt
from tiny_model import build_tiny_model

from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.sampled_model import AdapterError


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


def test_a_running_request_ends_under_the_version_it_began_with(sampler, adapters, references):
    with ThreadPoolExecutor(8) as pool:
        running = [
            pool.submit(generate, sampler.url, PROMPT, session=f"old-{i}", max_tokens=300, ignore_eos=True)
            for i in range(6)
        ]
        while sampler.stats()["running"] < 6:
            pass
        handover = pool.submit(sampler.load_adapter, adapters[1], 1, config=LORA)
        while not sampler.stats()["waiting"]:
            late = pool.submit(generate, sampler.url, PROMPT, session="new", ignore_eos=True)
            break
        handover.result(timeout=60)
        old, new = [future.result(timeout=60) for future in running], late.result(timeout=60)
    assert all(agrees(choice, references[0]) for choice in old)
    assert [sampler.ledger.take(f"old-{i}")[0].version for i in range(6)] == [0] * 6
    assert agrees(new, references[sampler.ledger.take("new")[0].version])
    assert sampler.stats()["handover_wait_s"] > 0


def test_completions_under_many_handovers_belong_to_the_version_they_name(sampler, adapters, references):
    stop = threading.Event()
    done: list[tuple[int, dict]] = []

    def ask(worker: int) -> None:
        turn = 0
        while not stop.is_set():
            session = f"{worker}-{turn}"
            choice = generate(sampler.url, PROMPT, session=session, max_tokens=10, ignore_eos=True)
            done.append((sampler.ledger.take(session)[0].version, choice))
            turn += 1

    with ThreadPoolExecutor(6) as pool:
        workers = [pool.submit(ask, i) for i in range(6)]
        for version in (1, 2, 1, 2, 1):
            sampler.load_adapter(adapters[version], version, config=LORA)
        stop.set()
        for worker in workers:
            worker.result(timeout=30)
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
