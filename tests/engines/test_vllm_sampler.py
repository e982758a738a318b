"""vLLM as the sampler: adapters by version, what a request is told, what becomes of it in the ledger, and its process.

A process of its own stands in for vLLM, started by the same command line; its tokens and log-probabilities are real.
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

import httpx
import psutil
import pytest
import torch
from leftovers import still_there
from patience import wait_until
from sampler_setup import LORA, PROMPT, Reference, agrees, generate, logprobs_of, random_adapter, random_prompt
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
    """The stand-in on the PATH, for a test that starts one of its own."""
    monkeypatch.setenv("PATH", f"{write_stand_in(tmp_path / 'bin')}:/usr/bin:/bin")


def sampler_of(model: Path, folder: Path, **settings) -> VllmSampler:
    given: dict[str, Any] = {
        "max_model_len": LENGTH,
        "dtype": "float32",
        "memory_share": 0.5,
        "lora_rank": LORA.r,
        "adapted": sorted(LORA.target_modules or ()),
    } | settings
    return VllmSampler(str(model), folder=folder / "adapters", log=folder / "log" / "vllm.log", **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def sampler(model: Path, folder: Path):
    """One for all: to start it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{write_stand_in(folder / 'bin')}:/usr/bin:/bin")
        running = sampler_of(model, folder)
    with running:
        yield running


def hand_over(sampler: VllmSampler, model: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The next version: its number, and its weights."""
    version = int(sampler.stats()["version"]) + 1
    weights = random_adapter(model, seed=version)
    sampler.load_adapter(weights, version, config=LORA)
    return version, weights


def family(number: int) -> list[psutil.Process]:
    root = psutil.Process(number)
    return [root, *root.children(recursive=True)]


def test_each_request_is_sampled_by_the_version_that_was_current_when_it_came(sampler, model):
    found = {0: (None, generate(sampler.url, PROMPT, session="t0"))}
    for _ in range(2):
        version, weights = hand_over(sampler, model)
        found[version] = weights, generate(sampler.url, PROMPT, session=f"t{version}")
    assert list(found) == [0, 1, 2]
    for version, (weights, choice) in found.items():
        assert agrees(choice, Reference(model, weights)), version
        (entered,) = sampler.ledger.take(f"t{version}")
        assert (entered.version, entered.prompt_len) == (version, len(PROMPT))
        assert list(entered.token_ids) == choice["token_ids"] and list(entered.logprobs) == logprobs_of(choice)


def test_a_hand_over_waits_for_no_request_and_each_says_its_own_version(sampler, model):
    first, weights = hand_over(sampler, model)
    references = {first: Reference(model, weights)}
    prompts = [random_prompt(20, seed=seed) for seed in range(12)]

    def ask(i: int) -> dict:
        return generate(sampler.url, prompts[i], session=f"h{i}", max_tokens=60, ignore_eos=True)

    with ThreadPoolExecutor(13) as pool:
        asked = [pool.submit(ask, i) for i in range(6)]
        while sampler.stats()["running"] < 6:
            time.sleep(0.002)
        # The stand-in takes the adapter when these are done, as it holds one at a time; they stay the first version's.
        second, weights = hand_over(sampler, model)
        references[second] = Reference(model, weights)
        asked += [pool.submit(ask, i) for i in range(6, 12)]
        choices = [one.result() for one in asked]
    versions = []
    for i, choice in enumerate(choices):
        (entered,) = sampler.ledger.take(f"h{i}")
        other = first + second - entered.version
        assert agrees(choice, references[entered.version], prompts[i])
        assert not agrees(choice, references[other], prompts[i])
        versions.append(entered.version)
    assert versions == [first] * 6 + [second] * 6


def test_files_of_versions_that_nobody_asks_for_are_removed(sampler, model, folder):
    for _ in range(3):
        version, _ = hand_over(sampler, model)
    assert {path.name for path in (folder / "adapters").iterdir()} == {str(version - 1), str(version)}


def test_the_end_leaves_no_process_and_no_file(vllm, model, tmp_path):
    with sampler_of(model, tmp_path) as sampler:
        sampler.load_adapter(random_adapter(model, seed=1), 1, config=LORA)
        files = {path.name for path in (tmp_path / "adapters" / "1").iterdir()} - {"README.md"}
        assert files == {"adapter_config.json", "adapter_model.safetensors"}
        config = json.loads((tmp_path / "adapters" / "1" / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", LORA.r, LORA.lora_alpha)
        running = family(sampler.processes[0].pid)
        socket = sampler._settings.socket
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert still_there(running) == [] and not (tmp_path / "adapters").exists() and not socket.parent.exists()
    sampler.stop()


def test_some_of_what_was_sampled_is_scored_again_by_the_version_that_sampled_it(sampler, model):
    sampler.score_again()
    weights = dict([hand_over(sampler, model)])
    generate(sampler.url, random_prompt(30, seed=1), session="first")
    weights |= [hand_over(sampler, model)]
    generate(sampler.url, random_prompt(30, seed=2), session="second")
    scored = sampler.score_again()
    assert [one.version for one in scored] == list(weights)
    for one in scored:
        assert torch.allclose(torch.tensor(one.again), torch.tensor(one.logprobs), atol=1e-5)
        reference = Reference(model, weights[one.version]).logprobs(one.token_ids[:30], one.token_ids[30:])
        assert torch.allclose(torch.tensor(one.again), reference, atol=1e-5)
    assert sampler.score_again() == []


def test_what_fills_the_context_is_scored_again_up_to_its_last_token(sampler):
    sampler.score_again()
    generate(sampler.url, PROMPT, session="t", max_tokens=LENGTH - len(PROMPT), ignore_eos=True)
    (scored,) = sampler.score_again()
    assert len(scored.token_ids) == LENGTH - 1
    assert len(scored.again) == len(scored.logprobs) == len(scored.positions) == LENGTH - 1 - len(PROMPT)


def test_what_another_temperature_or_a_truncation_drew_is_not_scored_again(sampler):
    sampler.score_again()
    generate(sampler.url, PROMPT, temperature=0.7)
    generate(sampler.url, PROMPT, top_k=5)
    assert sampler.score_again() == []


def test_bad_requests_are_told_as_by_the_embedded_sampler(sampler):
    post = lambda path, body: httpx.post(f"{sampler.url}{path}", json=body, timeout=30)  # noqa: E731
    long = post("/inference/v1/generate", {"token_ids": [5] * LENGTH, "sampling_params": {}})
    assert long.status_code == 400 and f"maximum context length is {LENGTH}" in long.text
    assert post("/inference/v1/generate", {"token_ids": [5], "model": "policy-1"}).status_code == 404
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    assert post("/v1/chat/completions", chat).status_code == 404
    card = httpx.get(f"{sampler.url}/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in card] == [(sampler._settings.model, LENGTH)]


def test_nothing_of_vllm_listens_on_a_port(sampler):
    served = family(sampler.processes[0].pid)
    ports = {one.laddr.port for process in served for one in process.net_connections("inet") if one.status == "LISTEN"}
    # The stand-in's own sampler has one, which vLLM has not.
    assert len(ports) == 1 and sampler._settings.socket.is_socket()
    told = psutil.Process(sampler.processes[0].pid).environ()
    assert told["VLLM_RPC_BASE_PATH"] == str(sampler._settings.socket.parent), "where it goes with all that is in it"


@pytest.mark.parametrize(
    ("fault", "said"),
    [("dies", "ended: ValueError: Free memory on device is less"), ("silent", "no log-probabilities of the prompt")],
)
def test_a_vllm_that_cannot_serve_ends_the_start_with_what_it_said(vllm, model, tmp_path, monkeypatch, fault, said):
    monkeypatch.setenv("STAND_IN_FAULT", fault)
    sampler = sampler_of(model, tmp_path)
    with pytest.raises(RunStoppedError, match=said) as stopped:
        sampler.start()
    assert "vllm.log" in str(stopped.value) and "\n" not in str(stopped.value)
    assert not any(process.alive for process in sampler.processes)
    assert not sampler._settings.socket.parent.exists()


def test_a_vllm_that_is_not_ready_in_time_is_ended(vllm, model, tmp_path, monkeypatch):
    monkeypatch.setattr("harbortrainer.engines.vllm.vllm_sampler.STARTUP_S", 0.0)
    sampler = sampler_of(model, tmp_path)
    with pytest.raises(RunStoppedError, match="was not ready after 0 s"):
        sampler.start()
    assert not any(process.alive for process in sampler.processes)


def test_an_adapter_that_vllm_does_not_take_stops_the_run(vllm, model, tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAULT", "unfit")
    with sampler_of(model, tmp_path) as sampler:
        with pytest.raises(RunStoppedError, match="does not take the adapter: policy-1 is not taken"):
            sampler.load_adapter(random_adapter(model, seed=1), 1, config=LORA)
        assert sampler.stats()["version"] == 0


def test_a_vllm_that_dies_fails_its_requests_and_stops_the_run(vllm, model, tmp_path):
    with sampler_of(model, tmp_path) as sampler:
        os.killpg(sampler.processes[0].pid, signal.SIGKILL)
        with pytest.raises(RunStoppedError, match="vllm serve ended"):
            asyncio.run(watch(sampler.processes))
        answer = httpx.post(f"{sampler.url}/inference/v1/generate", json={"token_ids": [5]}, timeout=30)
        assert answer.status_code == 500 and "vllm serve ended" in answer.text
        assert httpx.get(f"{sampler.url}/health").status_code == 503


@pytest.mark.long
def test_a_killed_run_leaves_no_vllm(vllm, model, tmp_path):
    code = (
        "import sys; from pathlib import Path; from test_vllm_sampler import sampler_of\n"
        f"sampler = sampler_of(Path({str(model)!r}), Path({str(tmp_path)!r})).start()\n"
        "print(sampler.processes[0].pid, flush=True); sys.stdin.read()"
    )
    with tempfile.TemporaryDirectory() as short:
        found = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "TMPDIR": short}
        with subprocess.Popen(
            [sys.executable, "-c", code], env=found, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as run:
            assert run.stdout is not None
            running = family(int(run.stdout.readline()))
            (socket,) = Path(short).glob("vllm-*/s")
            run.kill()
        assert still_there(running) == []
        wait_until(lambda: not socket.parent.exists())


def test_a_port_in_use_is_told_and_nothing_is_started(vllm, model, tmp_path, sampler):
    with pytest.raises(UserError, match="is in use"):
        sampler_of(model, tmp_path, port=int(sampler.url.rpartition(":")[2]))
