"""Helpers of the sampler's tests: requests, a reference forward pass, and random adapters."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.http_server import KEY_VARIABLE

API_KEY = os.environ.setdefault(KEY_VARIABLE, "the key of the tests")
"""Key of every sampler that a test starts without one."""
http = httpx.Client(headers={"Authorization": f"Bearer {API_KEY}"}, limits=httpx.Limits(max_keepalive_connections=0))
"""Sends requests with that key, each over a connection of its own."""

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"])


def generate(url: str, prompt: Sequence[int], *, session: str = "", timeout: float = 60, **sampling: Any) -> dict:
    """Send one request and return its first choice; raises on an error status."""
    body = {"token_ids": list(prompt), "sampling_params": {"max_tokens": 16, "logprobs": 1, **sampling}}
    headers = {"X-Session-ID": session} if session else {}
    reply = http.post(f"{url}/inference/v1/generate", json=body, headers=headers, timeout=timeout)
    reply.raise_for_status()
    return reply.json()["choices"][0]


def logprobs_of(choice: dict) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def random_prompt(length: int, seed: int, vocab: int = 300) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


class Reference:
    """The model computed by plain transformers and peft: one sequence, no cache."""

    def __init__(self, folder: Path, adapter: dict[str, torch.Tensor] | None = None) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if adapter is not None:
            model = get_peft_model(model, LORA)
            set_adapter(model, adapter)
        self.model = model.eval()

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """Return the log-probabilities of `tokens` after `prompt`, [len(tokens)]."""
        logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


PROMPT = random_prompt(40, seed=6)


def agrees(choice: dict, reference: Reference, prompt: Sequence[int] = PROMPT) -> bool:
    """Whether a choice's log-probabilities match the reference."""
    expected = reference.logprobs(prompt, choice["token_ids"])
    return torch.allclose(torch.tensor(logprobs_of(choice)), expected, atol=1e-5)


def random_adapter(folder: Path, seed: int, scale: float = 0.2) -> dict[str, torch.Tensor]:
    """Return an adapter, with peft's keys, that changes the model's output clearly."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), LORA)
    generator = torch.Generator().manual_seed(seed)
    state = get_peft_model_state_dict(model)
    return {key: torch.randn(tensor.shape, generator=generator) * scale for key, tensor in state.items()}


def set_adapter(model: Any, state: dict[str, torch.Tensor]) -> None:
    from peft import set_peft_model_state_dict

    result = set_peft_model_state_dict(model, {key: tensor.clone() for key, tensor in state.items()})
    assert not result.unexpected_keys


def sample_across_updates(sampler: Sampler, load: Callable[[int], object]) -> list[tuple[int, dict]]:
    """Send requests from six threads during weight updates; return each choice with its logged version.

    Args:
        load: Loads the weights of version 1 or 2 into the sampler.
    """
    stop = threading.Event()
    choices: list[tuple[int, dict]] = []

    def send_requests(worker: int) -> None:
        turn = 0
        while not stop.is_set():
            session = f"{worker}-{turn}"
            choice = generate(sampler.url, PROMPT, session=session, max_tokens=10, ignore_eos=True)
            choices.append((sampler.completion_log.pop(session)[0].version, choice))
            turn += 1

    with ThreadPoolExecutor(6) as pool:
        workers = [pool.submit(send_requests, i) for i in range(6)]
        for version in (1, 2, 1, 2, 1):
            load(version)
        stop.set()
        for worker in workers:
            worker.result(timeout=60)
    return choices


def sample_for_training(sampler: Sampler, version: int = 0) -> Sample:
    """Sample a completion of `PROMPT` and return it as a training sample: advantage 1, temperature 1."""
    session = f"sample-{version}"
    generate(sampler.url, PROMPT, session=session, ignore_eos=True)
    (completion,) = sampler.completion_log.pop(session)
    before, length = len(PROMPT), len(completion.token_ids)
    ids, mask = [*PROMPT, *completion.token_ids], [False] * before + [True] * length
    return Sample(ids, mask, [0.0] * before + list(completion.logprobs), [version] * len(ids), 1.0, 1.0)
