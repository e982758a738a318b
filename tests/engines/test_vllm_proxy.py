"""Requests of the proxy to vLLM."""

import json
from types import SimpleNamespace
from typing import Any

from harbortrainer.engines.local.sampler.completion_log import CompletionLog
from harbortrainer.engines.local.sampler.requests import GenerateRequest
from harbortrainer.engines.vllm.vllm_proxy import VllmProxy

ANSWER = {
    "token_ids": [5],
    "finish_reason": "stop",
    "logprobs": {"content": [{"logprob": -1.0, "token": "token_id:5"}]},
}


class Client:
    """Records the sampling parameters of each request."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    async def post(self, path: str, *, json: dict[str, Any], **options: object) -> SimpleNamespace:
        self.sent.append(json["sampling_params"])
        return SimpleNamespace(content=encoded({"choices": [ANSWER]}), status_code=200, is_error=False)


def encoded(body: object) -> bytes:
    return json.dumps(body).encode()


async def test_turns_of_a_seeded_trial_have_seeds_of_their_own() -> None:
    """vLLM starts its random numbers anew for each request."""
    client = Client()
    proxy = VllmProxy(client, SimpleNamespace(alive=True), "m", 100, CompletionLog())  # ty: ignore[invalid-argument-type]
    for prompt in ([1, 2, 3], [1, 2, 3, 5, 9, 9], [1, 2, 3]):
        body = {"token_ids": prompt, "sampling_params": {"seed": 1234, "temperature": 1.0}}
        await proxy.generate(GenerateRequest.model_validate(body), "trial")
    await proxy.generate(GenerateRequest.model_validate({"token_ids": [1], "sampling_params": {}}), "trial")
    first, second, again = (params["seed"] for params in client.sent[:3])
    assert first == again != second
    assert min(first, second) >= 0 and max(first, second) < 2**63
    assert "seed" not in client.sent[3]
