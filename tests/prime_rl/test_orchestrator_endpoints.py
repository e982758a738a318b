"""Tests of the sampler's extra endpoints for Prime-RL's orchestrator; Prime-RL itself is not needed."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from orchestrator_endpoints import OrchestratorSampler
from sampler_setup import LORA, PROMPT, Reference, agrees, generate, http
from tiny_model import build_tiny_model


@pytest.fixture
def sampler(folder):
    with OrchestratorSampler(folder, model_name="policy", max_model_len=512) as running:
        yield running


def save(folder: Path, state: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    LORA.save_pretrained(str(folder))
    save_file(state, folder / "adapter_model.safetensors")


def test_adapter_is_loaded_and_unloaded_over_http(sampler, adapters, references, tmp_path):
    save(tmp_path / "step_7", adapters[2])
    url = sampler.url
    load = {"lora_name": "r8", "lora_path": str(tmp_path / "step_7")}
    assert http.post(url + "/load_lora_adapter", json=load, timeout=30).json() == {"status": "ok"}
    assert sampler.version == 7
    assert [card["id"] for card in http.get(url + "/v1/models").json()["data"]] == ["policy", "r8"]
    body = {"model": "r8", "token_ids": PROMPT, "sampling_params": {"max_tokens": 8}}
    reply = http.post(url + "/inference/v1/generate", json=body, timeout=30)
    assert agrees(reply.json()["choices"][0], references[2])
    assert http.post(url + "/unload_lora_adapter", json={"lora_name": "r8"}, timeout=30).status_code == 200
    assert sampler.version == 0
    assert agrees(generate(url, PROMPT), references[0])


def test_missing_adapter_is_404_and_broken_adapter_is_400(sampler, tmp_path):
    url = sampler.url + "/load_lora_adapter"
    missing = http.post(url, json={"lora_name": "r8", "lora_path": str(tmp_path / "nothing")}, timeout=30)
    assert missing.status_code == 404
    save(tmp_path / "broken", {"x": torch.zeros(1)})
    broken = http.post(url, json={"lora_name": "r8", "lora_path": str(tmp_path / "broken")}, timeout=30)
    assert broken.status_code == 400
    assert http.post(url, json={"lora_name": "r8"}, timeout=30).status_code == 400


def test_pause_finishes_running_requests_and_holds_new_ones(sampler):
    url = sampler.url
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(generate, url, PROMPT, max_tokens=200, ignore_eos=True)
        while not sampler.stats()["running"]:
            pass
        paused = http.post(url + "/pause", params={"mode": "keep", "clear_cache": "false"}, timeout=60)
        assert paused.json() == {"status": "paused"}
        assert running.done() or running.result(timeout=5)
        waiting = pool.submit(generate, url, PROMPT)
        while not sampler.stats()["waiting"]:
            pass
        assert http.post(url + "/pause", timeout=10).status_code == 200
        assert not waiting.done()
        assert http.post(url + "/resume", timeout=10).json() == {"status": "resumed"}
        assert waiting.result(timeout=30)["token_ids"]


def test_full_weights_are_loaded_from_a_folder_while_paused(sampler, adapters, references, tmp_path):
    other = build_tiny_model(tmp_path / "step_3", seed=5)
    for lora_layers in (False, True):
        if lora_layers:  # LoRA layers change the names of the weights
            sampler.load_adapter(adapters[1], 1, config=LORA)
            http.post(sampler.url + "/unload_lora_adapter", json={"lora_name": "policy"})
            sampler.load_adapter({k: torch.zeros_like(t) for k, t in adapters[1].items()}, 2)
        http.post(sampler.url + "/pause", timeout=10)
        reply = http.post(sampler.url + "/update_weights", json={"weight_dir": str(other)}, timeout=30)
        assert reply.json() == {"status": "ok"}
        http.post(sampler.url + "/resume", timeout=10)
        assert sampler.version == 3
        assert agrees(generate(sampler.url, PROMPT, ignore_eos=True), Reference(other))


@pytest.mark.parametrize(
    ("body", "status"), [({"weight_dir": None}, 400), ({"weight_dir": "/nowhere"}, 404), ([], 400)]
)
def test_missing_weights_are_refused(sampler, body, status):
    assert http.post(sampler.url + "/update_weights", json=body, timeout=10).status_code == status


def test_non_json_bodies_are_bad_requests(sampler):
    for path in ("/load_lora_adapter", "/update_weights"):
        assert http.post(sampler.url + path, content=b"{nonsense").status_code == 400


def test_metrics_are_prometheus_text_with_vllm_names(sampler):
    generate(sampler.url, [5, 6, 7], max_tokens=2)
    text = http.get(sampler.url + "/metrics").text
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name.split("{")[0]] = float(value)
    assert values["vllm:num_requests_running"] == 0
    assert values["vllm:generation_tokens_total"] >= 2
    assert values["harbortrainer_policy_version"] == 0
    assert 'kv_cache_size_tokens="' in text


def test_metrics_are_served_after_the_engine_died(sampler):
    def broken(*_args, **_kwargs):
        raise RuntimeError("out of memory")

    sampler._model.forward = broken
    with pytest.raises(httpx.HTTPStatusError):
        generate(sampler.url, [5])
    assert http.get(sampler.url + "/metrics").status_code == 200
