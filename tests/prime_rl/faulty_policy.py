"""A model server for Prime-RL's orchestrator that plays the fault which the task's instruction names.

The orchestrator knows one address for all tasks, so that the fault stands in the prompt: `This is about: silent.` What
it publishes of the policy, the server takes note of and answers `ok`; its answers are written down.
"""

from dataclasses import dataclass

from aiohttp import web
from faulty_engine import FAULTS, FaultyEngine
from orchestrator_endpoints import prometheus
from troubles import subject_of

_IDLE = ("running", "waiting", "cache_used_tokens", "cache_tokens", "prompt_tokens", "sampled_tokens", "version")


@dataclass
class FaultyPolicy(FaultyEngine):
    """Faulty for prompts about a fault; all others are answered as the script says."""

    def routes(self) -> list[web.RouteDef]:
        administration = ("/pause", "/resume", "/update_weights", "/load_lora_adapter", "/v1/load_lora_adapter")
        return [
            web.post("/inference/v1/generate", self._faulty),
            web.get("/v1/models", self._models),
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            *(web.post(path, self._health) for path in administration),
        ]

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=prometheus(dict.fromkeys(_IDLE, 0.0), self.model))

    def _fault_of(self, request: web.Request, body: dict) -> str:
        subject = subject_of(self.tokenizer.decode(body["token_ids"]))
        return subject if subject in FAULTS else ""
