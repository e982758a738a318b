"""Engine failures: requests fail at once, `/health` reports the failure, and nothing hangs."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from patience import HANG_S, wait_until
from sampler_setup import generate, http, random_prompt

from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.sampling_engine import EngineFailedError


class BrokenAfter:
    """A forward pass that works `calls` times and then raises."""

    def __init__(self, forward, calls: int) -> None:
        self.forward, self.left = forward, calls

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("out of memory")
        return self.forward(*args, **kwargs)


def request_completion(url: str, length: int) -> httpx.Response:
    body = {"token_ids": random_prompt(length, length), "sampling_params": {"max_tokens": 200, "ignore_eos": True}}
    return http.post(url + "/inference/v1/generate", json=body, timeout=HANG_S)


def test_dead_engine_fails_running_and_new_requests(folder):
    with Sampler(folder, max_model_len=256) as sampler:
        sampler._model.forward = BrokenAfter(sampler._model.forward, 20)
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda n: request_completion(sampler.url, n), (5, 6, 7, 8)))
        assert {reply.status_code for reply in replies} == {500}
        assert all("engine" in reply.json()["error"]["message"] for reply in replies)
        wait_until(lambda: http.get(sampler.url + "/health").status_code != 200)
        health = http.get(sampler.url + "/health")
        assert health.status_code == 503
        assert "out of memory" in health.json()["error"]["message"]
        assert request_completion(sampler.url, 5).status_code == 500
        with pytest.raises(EngineFailedError, match="out of memory"):
            sampler.load_adapter({}, 1)
        assert sampler.stats()["failed"] == 5


def test_nan_logits_are_an_error(folder):
    with Sampler(folder, max_model_len=256) as sampler:
        sampler._model.model.norm.weight.fill_(float("nan"))
        reply = request_completion(sampler.url, 5)
        assert reply.status_code == 500
        assert "not a distribution" in reply.json()["error"]["message"]


def test_stop_fails_running_requests(folder):
    sampler = Sampler(folder, max_model_len=2048).start()
    with ThreadPoolExecutor(1) as pool:
        body = {"token_ids": [5], "sampling_params": {"max_tokens": 2000, "ignore_eos": True, "n": 64}}
        running = pool.submit(http.post, sampler.url + "/inference/v1/generate", json=body, timeout=HANG_S)
        while not sampler.stats()["running"]:
            time.sleep(0.001)
        begin = time.monotonic()
        sampler.stop()
        assert time.monotonic() - begin < 25  # stop would wait 30 s for requests that do not end
        with contextlib.suppress(httpx.TransportError):
            assert running.result().status_code == 500
    sampler.stop()
    with pytest.raises(httpx.ConnectError):
        http.get(sampler.url + "/health")


def test_sampler_starts_after_another_was_stopped(folder):
    tokens = set()
    for _ in range(2):
        with Sampler(folder, seed=1, max_model_len=128) as sampler:
            tokens.add(tuple(generate(sampler.url, [4, 5], session="a")["token_ids"]))
    assert len(tokens) == 1
