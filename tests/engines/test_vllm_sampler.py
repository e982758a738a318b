"""vLLM as the sampler: adapters by version, replies, the completion log, and the process.

A stand-in process replaces vLLM, with the same command line and real tokens and log-probabilities.
"""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from leftovers import remaining_processes
from patience import wait_until
from sampler_setup import LORA, PROMPT, Reference, agrees, generate, http, logprobs_of, random_adapter, random_prompt
from tiny_model import build_tiny_model
from vllm_stand_in import write_stand_in

from harbortrainer.engines.env_server import watch
from harbortrainer.engines.vllm.vllm_sampler import VllmSampler
from harbortrainer.errors import RunStoppedError, UserError

LENGTH = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def vllm(monkeypatch, tmp_path):
    """Put the stand-in on the PATH, for tests that start their own."""
    monkeypatch.setenv("PATH", f"{write_stand_in(tmp_path / 'bin')}:/usr/bin:/bin")


def sampler_of(model: Path, folder: Path, **settings) -> VllmSampler:
    options: dict[str, Any] = {
        "max_model_len": LENGTH,
        "dtype": "float32",
        "memory_share": 0.5,
        "lora_rank": LORA.r,
        "lora_layers": sorted(LORA.target_modules or ()),
    } | settings
    return VllmSampler(str(model), folder=folder / "adapters", log=folder / "log" / "vllm.log", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def sampler(model: Path, folder: Path):
    """One sampler for all tests: a start takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{write_stand_in(folder / 'bin')}:/usr/bin:/bin")
        running = sampler_of(model, folder)
    with running:
        yield running


def update_weights(sampler: VllmSampler, model: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Load the next version; return its number and its weights."""
    version = int(sampler.stats()["version"]) + 1
    weights = random_adapter(model, seed=version)
    sampler.load_adapter(weights, version, config=LORA)
    return version, weights


def process_tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def test_request_uses_version_current_at_arrival(sampler, model):
    found = {0: (None, generate(sampler.url, PROMPT, session="t0"))}
    for _ in range(2):
        version, weights = update_weights(sampler, model)
        found[version] = weights, generate(sampler.url, PROMPT, session=f"t{version}")
        assert [span["version"] for span in found[version][1]["weight_versions"]] == [str(version)]
    assert list(found) == [0, 1, 2]
    for version, (weights, choice) in found.items():
        assert agrees(choice, Reference(model, weights)), version
        (completion,) = sampler.completion_log.pop(f"t{version}")
        assert (completion.version, completion.prompt_len) == (version, len(PROMPT))
        assert list(completion.token_ids) == choice["token_ids"] and list(completion.logprobs) == logprobs_of(choice)


def test_update_does_not_wait_and_requests_keep_their_version(sampler, model):
    first, weights = update_weights(sampler, model)
    references = {first: Reference(model, weights)}
    prompts = [random_prompt(20, seed=seed) for seed in range(12)]

    def request_completion(i: int) -> dict:
        return generate(sampler.url, prompts[i], session=f"h{i}", max_tokens=60, ignore_eos=True)

    with ThreadPoolExecutor(13) as pool:
        requests = [pool.submit(request_completion, i) for i in range(6)]
        while sampler.stats()["running"] < 6:
            time.sleep(0.002)
        # The stand-in holds one adapter and loads the next after these requests; they keep the first version.
        second, weights = update_weights(sampler, model)
        references[second] = Reference(model, weights)
        requests += [pool.submit(request_completion, i) for i in range(6, 12)]
        choices = [request.result() for request in requests]
    versions = []
    for i, choice in enumerate(choices):
        (completion,) = sampler.completion_log.pop(f"h{i}")
        other = first + second - completion.version
        assert agrees(choice, references[completion.version], prompts[i])
        assert not agrees(choice, references[other], prompts[i])
        versions.append(completion.version)
    assert versions == [first] * 6 + [second] * 6


def test_removes_files_of_unused_versions(sampler, model, folder):
    for _ in range(3):
        version, _ = update_weights(sampler, model)
    assert {path.name for path in (folder / "adapters").iterdir()} == {str(version - 1), str(version)}


def test_stop_leaves_no_process_and_no_file(vllm, model, tmp_path):
    with sampler_of(model, tmp_path) as sampler:
        sampler.load_adapter(random_adapter(model, seed=1), 1, config=LORA)
        files = {path.name for path in (tmp_path / "adapters" / "1").iterdir()} - {"README.md"}
        assert files == {"adapter_config.json", "adapter_model.safetensors"}
        config = json.loads((tmp_path / "adapters" / "1" / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", LORA.r, LORA.lora_alpha)
        running = process_tree(sampler.processes[0].pid)
        socket = sampler._settings.socket
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert remaining_processes(running) == [] and not (tmp_path / "adapters").exists() and not socket.parent.exists()
    sampler.stop()


def test_samples_are_rescored_by_their_version(sampler, model):
    sampler.rescore()
    weights = dict([update_weights(sampler, model)])
    generate(sampler.url, random_prompt(30, seed=1), session="first")
    weights |= [update_weights(sampler, model)]
    generate(sampler.url, random_prompt(30, seed=2), session="second")
    scored = sampler.rescore()
    assert [sequence.version for sequence in scored] == list(weights)
    for sequence in scored:
        assert torch.allclose(torch.tensor(sequence.recomputed), torch.tensor(sequence.logprobs), atol=1e-5)
        reference = Reference(model, weights[sequence.version]).logprobs(
            sequence.token_ids[:30], sequence.token_ids[30:]
        )
        assert torch.allclose(torch.tensor(sequence.recomputed), reference, atol=1e-5)
    assert sampler.rescore() == []


def test_full_context_is_rescored_except_last_token(sampler):
    sampler.rescore()
    generate(sampler.url, PROMPT, session="t", max_tokens=LENGTH - len(PROMPT), ignore_eos=True)
    (scored,) = sampler.rescore()
    assert len(scored.token_ids) == LENGTH - 1
    assert len(scored.recomputed) == len(scored.logprobs) == len(scored.positions) == LENGTH - 1 - len(PROMPT)


def test_other_temperatures_and_truncated_samples_are_not_rescored(sampler):
    sampler.rescore()
    generate(sampler.url, PROMPT, temperature=0.7)
    generate(sampler.url, PROMPT, top_k=5)
    assert sampler.rescore() == []


def test_bad_request_errors_match_embedded_sampler(sampler):
    post = lambda path, body: http.post(f"{sampler.url}{path}", json=body, timeout=30)  # noqa: E731
    long = post("/inference/v1/generate", {"token_ids": [5] * LENGTH, "sampling_params": {}})
    assert long.status_code == 400 and f"maximum context length is {LENGTH}" in long.text
    assert post("/inference/v1/generate", {"token_ids": [5], "model": "policy-1"}).status_code == 404
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    assert post("/v1/chat/completions", chat).status_code == 404
    cards = http.get(f"{sampler.url}/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in cards] == [(sampler._settings.model, LENGTH)]


def test_vllm_listens_on_no_port(sampler):
    served = process_tree(sampler.processes[0].pid)
    connections = [connection for process in served for connection in process.net_connections("inet")]
    ports = {connection.laddr.port for connection in connections if connection.status == "LISTEN"}
    # The stand-in's inner sampler has a port, which vLLM does not.
    assert len(ports) == 1 and sampler._settings.socket.is_socket()
    environment = psutil.Process(sampler.processes[0].pid).environ()
    assert environment["VLLM_RPC_BASE_PATH"] == str(sampler._settings.socket.parent), (
        "the folder is removed with its contents"
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [("dies", "ended: ValueError: Free memory on device is less"), ("silent", "no log-probabilities of the prompt")],
)
def test_start_error_has_vllm_output(vllm, model, tmp_path, monkeypatch, fault, message):
    monkeypatch.setenv("STAND_IN_FAULT", fault)
    sampler = sampler_of(model, tmp_path)
    with pytest.raises(RunStoppedError, match=message) as error:
        sampler.start()
    assert "vllm.log" in str(error.value) and "\n" not in str(error.value)
    assert not any(process.alive for process in sampler.processes)
    assert not sampler._settings.socket.parent.exists()


def test_vllm_is_ended_if_not_ready_in_time(vllm, model, tmp_path, monkeypatch):
    monkeypatch.setattr("harbortrainer.engines.vllm.vllm_sampler.STARTUP_S", 0.0)
    sampler = sampler_of(model, tmp_path)
    with pytest.raises(RunStoppedError, match="was not ready after 0 s"):
        sampler.start()
    assert not any(process.alive for process in sampler.processes)


def test_refused_adapter_stops_run(vllm, model, tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAULT", "unfit")
    with sampler_of(model, tmp_path) as sampler:
        with pytest.raises(RunStoppedError, match="refused the adapter: policy-1 is not taken"):
            sampler.load_adapter(random_adapter(model, seed=1), 1, config=LORA)
        assert sampler.stats()["version"] == 0


def test_dead_vllm_fails_requests_and_stops_run(vllm, model, tmp_path):
    with sampler_of(model, tmp_path) as sampler:
        os.killpg(sampler.processes[0].pid, signal.SIGKILL)
        with pytest.raises(RunStoppedError, match="vllm serve ended"):
            asyncio.run(watch(sampler.processes))
        answer = http.post(f"{sampler.url}/inference/v1/generate", json={"token_ids": [5]}, timeout=30)
        assert answer.status_code == 500 and "vllm serve ended" in answer.text
        assert http.get(f"{sampler.url}/health").status_code == 503


@pytest.mark.long
def test_killed_run_leaves_no_vllm(vllm, model, tmp_path):
    code = (
        "import sys; from pathlib import Path; from test_vllm_sampler import sampler_of\n"
        f"sampler = sampler_of(Path({str(model)!r}), Path({str(tmp_path)!r})).start()\n"
        "print(sampler.processes[0].pid, flush=True); sys.stdin.read()"
    )
    with tempfile.TemporaryDirectory() as short:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            "TMPDIR": short,
        }
        with subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as run:
            assert run.stdout is not None
            running = process_tree(int(run.stdout.readline()))
            (socket,) = Path(short).glob("vllm-*/s")
            run.kill()
        assert remaining_processes(running) == []
        wait_until(lambda: not socket.parent.exists())


def test_port_in_use_error_starts_nothing(vllm, model, tmp_path, sampler):
    with pytest.raises(UserError, match="is in use"):
        sampler_of(model, tmp_path, port=int(sampler.url.rpartition(":")[2]))
