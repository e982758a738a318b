"""What the sampler's tests share: a running sampler, a plain forward pass to compare with, an adapter."""

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

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"])


def generate(url: str, prompt: Sequence[int], *, session: str = "", timeout: float = 60, **sampling: Any) -> dict:
    """Posts one request and returns its first choice; raises on an error status."""
    body = {"token_ids": list(prompt), "sampling_params": {"max_tokens": 16, "logprobs": 1, **sampling}}
    headers = {"X-Session-ID": session} if session else {}
    reply = httpx.post(f"{url}/inference/v1/generate", json=body, headers=headers, timeout=timeout)
    reply.raise_for_status()
    return reply.json()["choices"][0]


def logprobs_of(choice: dict) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def random_prompt(length: int, seed: int, vocab: int = 300) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


class Reference:
    """The model as plain transformers and peft compute it: eager loading, one sequence, no cache."""

    def __init__(self, folder: Path, adapter: dict[str, torch.Tensor] | None = None) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if adapter is not None:
            model = get_peft_model(model, LORA)
            set_adapter(model, adapter)
        self.model = model.eval()

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """[len(tokens)] log-probabilities of `tokens` after `prompt`."""
        logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


PROMPT = random_prompt(40, seed=6)


def agrees(choice: dict, reference: Reference, prompt: Sequence[int] = PROMPT) -> bool:
    """Whether a choice's log-probabilities are the reference's."""
    expected = reference.logprobs(prompt, choice["token_ids"])
    return torch.allclose(torch.tensor(logprobs_of(choice)), expected, atol=1e-5)


def random_adapter(folder: Path, seed: int, scale: float = 0.2) -> dict[str, torch.Tensor]:
    """An adapter that changes the model visibly, under peft's keys."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), LORA)
    generator = torch.Generator().manual_seed(seed)
    state = get_peft_model_state_dict(model)
    return {key: torch.randn(tensor.shape, generator=generator) * scale for key, tensor in state.items()}


def set_adapter(model: Any, state: dict[str, torch.Tensor]) -> None:
    from peft import set_peft_model_state_dict

    result = set_peft_model_state_dict(model, {key: tensor.clone() for key, tensor in state.items()})
    assert not result.unexpected_keys


def sampled_under_handovers(sampler: Sampler, load: Callable[[int], object]) -> list[tuple[int, dict]]:
    """Six workers ask without a pause while versions 1 and 2 take turns. Each choice with the version it names.

    Args:
        load: Hands the sampler the weights of a version.
    """
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
            load(version)
        stop.set()
        for worker in workers:
            worker.result(timeout=60)
    return done


def sampled_sample(sampler: Sampler, version: int = 0) -> Sample:
    """What the sampler says after `PROMPT`, as the learner is given it: advantage 1, temperature 1."""
    session = f"sample-{version}"
    generate(sampler.url, PROMPT, session=session, ignore_eos=True)
    (done,) = sampler.ledger.take(session)
    before, length = len(PROMPT), len(done.token_ids)
    ids, mask = [*PROMPT, *done.token_ids], [False] * before + [True] * length
    return Sample(ids, mask, [0.0] * before + list(done.logprobs), [version] * len(ids), 1.0, 1.0)
